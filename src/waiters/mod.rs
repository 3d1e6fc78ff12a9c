//! Wakes the waiters of this process when something was refunded, released or forgotten in their store, and lists the
//! queues of operations that this process owes the store.

mod layers;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;
use tokio::sync::Notify;

use self::layers::LayerQuotas;
use crate::background::{OpQueue, WeakOpQueue};
use crate::limit::{Check, Key, Policies};
use crate::util::lock;

pub(crate) use self::layers::ListedLayer;

/// The requests of this process that wait for capacity in a [`Store`](crate::store::Store), and the charges, refunds and
/// releases that the process still owes the store, for [`flush`](crate::store::Store::flush). Clones share them.
#[derive(Clone, Default)]
pub struct Waiters(Arc<SharedWaiters>);

#[derive(Default)]
struct SharedWaiters {
    /// The wait queues of each caller: one per runtime and list of policies.
    wait_queues: Mutex<HashMap<Key, Vec<ListedQueue>>>,
    /// Number of these queues: without any there is no search.
    count: AtomicUsize,
    layers: LayerQuotas,
    /// The operation queues of all layers and limiters over the store.
    op_queues: Mutex<Vec<WeakOpQueue>>,
}

/// A wait queue under these policies. Its task is woken, not its requests.
struct ListedQueue {
    policies: Policies,
    wake: Arc<Wake>,
}

/// Wakes the task of a wait queue, and records whether its caller may have more room.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pub(crate) notify: Notify,
    freed: AtomicU32,
}

/// The listing of a wait queue, until it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    waiters: Waiters,
    key: Key,
    wake: Arc<Wake>,
}

impl Waiters {
    /// Wakes those who wait for what this check has freed, or may have. Call it after each check: one that frees nothing
    /// wakes nobody.
    #[inline]
    pub fn freed(&self, check: &Check) {
        if check.gives_room() && self.0.count.load(Ordering::Acquire) > 0 {
            self.wake(check);
        }
    }

    fn wake(&self, check: &Check) {
        let mut wakes = SmallVec::<[Arc<Wake>; 2]>::new();
        let wait_queues = lock(&self.0.wait_queues);
        if let Some(of_caller) = wait_queues.get(check.key()) {
            for queue in of_caller {
                if share_a_count(&queue.policies, check.policies()) {
                    wakes.push(Arc::clone(&queue.wake));
                }
            }
        }
        drop(wait_queues);
        // Outside of the lock, as waking a task may run code of its executor.
        for wake in wakes {
            wake.freed();
        }
    }

    fn layers(&self) -> &LayerQuotas {
        &self.0.layers
    }

    /// Adds a queue of the store's operations.
    pub(crate) fn add_op_queue(&self, queue: &OpQueue) {
        let queues = &mut *lock(&self.0.op_queues);
        // Before the list grows, so that layers that come and go do not fill it.
        if queues.len() == queues.capacity() {
            queues.retain(|queue| !queue.is_dropped());
        }
        queues.push(queue.downgrade());
    }

    /// Returns the queues of the store's operations.
    pub(crate) fn op_queues(&self) -> Vec<OpQueue> {
        let queues = lock(&self.0.op_queues);
        queues.iter().filter_map(WeakOpQueue::upgrade).collect()
    }

    /// Lists a wait queue, whose task is woken when a charge of this caller under any of these policies is freed.
    pub(crate) fn listen(self, key: Key, policies: Policies, wake: Arc<Wake>) -> Listener {
        let queue = ListedQueue {
            policies,
            wake: Arc::clone(&wake),
        };
        lock(&self.0.wait_queues)
            .entry(key)
            .or_default()
            .push(queue);
        self.0.count.fetch_add(1, Ordering::AcqRel);
        Listener {
            waiters: self,
            key,
            wake,
        }
    }
}

/// Returns `true` if a policy of each list has the same count.
fn share_a_count(waiting: &Policies, freed: &Policies) -> bool {
    for policy in waiting {
        if freed.iter().any(|freed| freed.id() == policy.id()) {
            return true;
        }
    }
    false
}

/// Equal if they are of one store.
impl PartialEq for Waiters {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Shows how many there are.
impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiters")
            .field(&self.0.count.load(Ordering::Relaxed))
            .finish()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let SharedWaiters {
            wait_queues, count, ..
        } = &*self.waiters.0;
        count.fetch_sub(1, Ordering::AcqRel);
        let wait_queues = &mut *lock(wait_queues);
        if let Some(of_caller) = wait_queues.get_mut(&self.key) {
            of_caller.retain(|queue| !Arc::ptr_eq(&queue.wake, &self.wake));
            if of_caller.is_empty() {
                wait_queues.remove(&self.key);
            }
        }
    }
}

impl Wake {
    /// Wakes the task, since its caller may have more room.
    pub(crate) fn freed(&self) {
        self.freed.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_one();
    }

    /// Whether something was freed since it was [taken](Self::take_freed).
    pub(crate) fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Acquire) > 0
    }

    /// How often something was freed since this was called last: of requests in flight, how many have ended.
    pub(crate) fn take_freed(&self) -> u32 {
        self.freed.swap(0, Ordering::AcqRel)
    }
}
