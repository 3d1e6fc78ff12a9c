//! Settling a charge after the response: the reservation is kept, refunded, or replaced by the
//! actual cost.
//!
//! **One account per request.** It contains the request's reservation under each list of policies.
//! The response body and every clone of the [`Charge`] that the handler extracts own the account;
//! the last one to be dropped settles it. So it is settled exactly once, however the request ends:
//! the end of its body, an error, a panic, a timeout, or a client that disconnects.
//!
//! **No request waits.** A queue sends charges and refunds off the request path.

mod account;
mod charge;
mod reservation;
mod reserved;
mod settlement;

pub use charge::Charge;
pub use reservation::{Reservation, ReserveError};
pub use settlement::Settlement;

pub(crate) use account::Settled;
pub(crate) use reserved::Reserved;

use account::Account;
