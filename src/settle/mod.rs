//! Settling a charge after the response: what was reserved is kept, refunded, or replaced by the real cost.
//!
//! **One account for a request.** It has what was reserved for the request under each list of policies. The response's
//! body holds it, and every clone of the [`Charge`] that the handler finds; the last one of them that is dropped
//! settles it. So whatever ends the request does so, once: the end of its body, an error, a panic, a timeout, a client
//! that disconnects.
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
