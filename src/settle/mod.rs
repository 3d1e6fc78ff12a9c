//! Settling a charge after the response: the reservation is kept, refunded, or replaced by the
//! actual cost.
//!
//! **One account per request.** It contains what the request was charged under each list of policies.
//! The response body and every clone of the [`RequestCost`] that the handler extracts own the account;
//! the last one to be dropped settles it. So it is settled exactly once, however the request ends:
//! the end of its body, an error, a panic, a timeout, or a client that disconnects.
//!
//! **No request waits.** A queue sends charges and refunds off the request path.

mod account;
mod request_cost;
mod reservation;
mod settlement;

pub use request_cost::RequestCost;
pub use reservation::{Reservation, ReserveError};
pub use settlement::Settlement;

pub(crate) use account::Settled;

use account::Account;
