//! Connections to one server: [dialing](Dialer), and the [pool](Pool), which discards broken
//! connections and backs off after failures. The topology chooses the server.

mod dial;
mod errors;
mod greeting;
mod login;
mod names;
mod pool;
mod tls;

pub(super) use dial::{Dialer, kept_alive, with_address};
pub(super) use errors::{STEPS, error_of, not_run, within};
pub(super) use greeting::check_client_name;
pub(super) use login::Login;
pub(super) use pool::{Connect, Driven, Epoch, Link, PING_INTERVAL, Pool, Replies, Times};
pub(super) use tls::Tls;
pub(in crate::store) use tls::no_tls;
#[cfg(feature = "tls")]
pub(in crate::store) use tls::{check_client, check_roots};
