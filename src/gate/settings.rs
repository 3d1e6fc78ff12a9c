//! The plain settings of a layer, which are copied whole.

use std::sync::Arc;
use std::time::Duration;

use super::{Blocking, OnMissingKey, Selector};
use crate::limit::{Key, Policies, words};

/// Declares the settings. `Clone` and `Default` are not derived, since a request of the type `R` need not have them.
macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $kind:ty,)*) => {
        /// The settings of a layer for requests of the type `R` that need nothing but their value.
        pub(crate) struct Settings<R> {
            $($(#[$doc])* pub(crate) $name: $kind,)*
        }

        impl<R> Clone for Settings<R> {
            fn clone(&self) -> Self {
                Self { $($name: self.$name.clone(),)* }
            }
        }

        impl<R> Default for Settings<R> {
            fn default() -> Self {
                Self { $($name: Default::default(),)* }
            }
        }
    };
}

settings! {
    /// Policies that are checked but not enforced, in addition to the enforced ones.
    shadows: Vec<Selector<R>>,
    /// How the layer's own policies are enforced.
    enforcement: Enforcement,
    /// The blocks of callers, unless it is a dry run.
    blocking: Option<Blocking<R>>,
    /// Whether a blocked caller gets a 403 instead of a 429.
    forbids_blocked: bool,
    /// Selects exempt requests: they pass without a key or a check.
    skip: Option<Arc<dyn Fn(&R) -> bool + Send + Sync>>,
    /// Whether denials of a blocked caller extend the block.
    extends_blocks: bool,
    /// The cost of a request under its policies.
    cost: Option<Arc<dyn Fn(&R, &Policies) -> u32 + Send + Sync>>,
    /// The time for which the client waits for a response, if the request states it.
    client_wait: Option<fn(&R) -> Option<Duration>>,
    /// The id under which a request is charged once. Returns `None` if each repetition is charged.
    id: Option<Arc<dyn Fn(&R) -> Option<Key> + Send + Sync>>,
    on_error: OnError,
    on_missing_key: OnMissingKey,
}

/// How the policies of a layer are enforced. One value, so that a plain layer compares once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Enforcement {
    #[default]
    Plain,
    /// Several keys must allow a request.
    SeveralKeys,
    /// A blocked caller is denied without a check. There may be several keys.
    WithBlocks,
    /// Nothing is denied.
    DryRun,
}

/// Whether to reject a request or a call that the store could not decide. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnError {
    /// Reject the request: over HTTP with 503. A [throttle](crate::ThrottleLayer::on_error) retries first.
    #[default]
    Reject,
    /// Admit the request, uncounted.
    Allow,
}

impl OnError {
    /// Returns `true` if a request passes that no store could decide.
    pub(crate) const fn passes_undecided(self) -> bool {
        match self {
            Self::Reject => false,
            Self::Allow => true,
        }
    }
}

words!(OnError, "answer to an error": Reject = "reject", Allow = "allow");
