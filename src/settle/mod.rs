//! Settling a charge after the response: the reservation is kept, refunded, or replaced by the
//! actual cost.
//!
//! **Settled once.** `RequestCharges` are the charges of a request under each list of policies. The
//! response body and every clone of the [`RequestCost`] that the handler extracts own them; the last
//! one to be dropped settles them. So a request is settled exactly once, however the request ends:
//! the end of its body, an error, a panic, a timeout, or a client that disconnects.
//!
//! **No request waits.** A queue sends charges and refunds off the request path.
//!
//! **Reports.** A settlement makes no event. The queue reports an operation that it gives up as
//! [`Failed`](crate::observe::Event::Failed).

mod charges;
mod request_cost;
mod reservation;

pub use charges::Settlement;
pub use request_cost::RequestCost;
pub use reservation::{Reservation, ReserveError};

use charges::RequestCharges;
