//! The tracker of each store in this process.
//!
//! A store counts what an instance holds as one number, whoever takes it: two layers, or a layer and a
//! [`Limiter`](crate::Limiter). Each with a tracker of its own would put the store wrong by what the other holds.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use super::Tracker;
use crate::util::lock;

static REGISTRY: LazyLock<Mutex<HashMap<usize, Weak<Tracker>>>> = LazyLock::new(Mutex::default);

/// The tracker of the store of this identity, made if there is none. A store without an identity has a new one each time.
///
/// Who holds the tracker, or a request in it, keeps the store, so that no other store gets its identity meanwhile.
pub(super) fn find(identity: Option<usize>) -> Arc<Tracker> {
    let Some(identity) = identity else { return Arc::new(Tracker::new()) };
    let registry = &mut *lock(&REGISTRY);
    if let Some(tracker) = registry.get(&identity).and_then(Weak::upgrade) {
        return tracker;
    }
    registry.retain(|_, tracker| tracker.strong_count() > 0);
    let tracker = Arc::new(Tracker::new());
    registry.insert(identity, Arc::downgrade(&tracker));
    tracker
}
