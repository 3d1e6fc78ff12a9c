//! Wakes the waiters of this process when something was refunded, released or forgotten in their store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use tokio::sync::Notify;

use crate::limit::{Check, Key, Mode, Policies};
use crate::util::lock;

/// Wakes a waiter, and records whether a caller may have more room.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pub(crate) notify: Notify,
    freed: AtomicU32,
}

impl Wake {
    /// Whether something was freed since it was [taken](Self::take_freed).
    pub(crate) fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Acquire) > 0
    }

    /// How many requests in flight have ended since this was called last, where more than one has. At least 1 if
    /// anything was freed.
    pub(crate) fn take_freed(&self) -> u32 {
        self.freed.swap(0, Ordering::AcqRel)
    }
}

/// Is woken when a charge of a caller under any of these policies is freed in a store, until it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    of: (usize, Key),
    wake: Arc<Wake>,
}

/// By the [identity](crate::store::Store::identity) of the store and the caller: several may wait for one, each under
/// its policies.
type Listeners = HashMap<(usize, Key), Vec<(Policies, Arc<Wake>)>>;

static LISTENERS: LazyLock<Mutex<Listeners>> = LazyLock::new(Mutex::default);
/// How many there are: without waiters there is no search.
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Listener {
    /// `None` for a store without an identity.
    pub(crate) fn new(
        store: Option<usize>,
        key: Key,
        policies: Policies,
        wake: Arc<Wake>,
    ) -> Option<Self> {
        let of = (store?, key);
        lock(&LISTENERS)
            .entry(of)
            .or_default()
            .push((policies, Arc::clone(&wake)));
        COUNT.fetch_add(1, Ordering::AcqRel);
        Some(Self { of, wake })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::AcqRel);
        let listeners = &mut *lock(&LISTENERS);
        let Some(of_caller) = listeners.get_mut(&self.of) else {
            return;
        };
        of_caller.retain(|(_, wake)| !Arc::ptr_eq(wake, &self.wake));
        if of_caller.is_empty() {
            listeners.remove(&self.of);
        }
    }
}

/// Whether less may be charged after it than before.
pub(super) fn gives_room(check: &Check) -> bool {
    matches!(check.mode(), Mode::Refund | Mode::Reset | Mode::Release)
}

/// The store of this identity has done this, or may have.
pub(super) fn tell(store: usize, check: &Check) {
    if !gives_room(check) || COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    for (policies, wake) in lock(&LISTENERS)
        .get(&(store, *check.key()))
        .into_iter()
        .flatten()
    {
        if policies.iter().any(|policy| {
            check
                .policies()
                .iter()
                .any(|freed| freed.id() == policy.id())
        }) {
            wake.freed.fetch_add(1, Ordering::AcqRel);
            wake.notify.notify_one();
        }
    }
}
