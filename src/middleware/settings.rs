use std::sync::Arc;

use super::copies::Copies;

/// The settings of a layer and its services: the extractor, and the others, which the future of
/// each request shares.
pub(super) struct Settings<K, C>(Copies<(Arc<K>, Arc<C>)>);

impl<K, C: Clone> Settings<K, C> {
    pub(super) fn new(extractor: Arc<K>, config: C) -> Self {
        Self(Copies::new(|| {
            (Arc::clone(&extractor), Arc::new(config.clone()))
        }))
    }

    /// The settings after a change.
    pub(super) fn change<C2: Clone>(&self, change: impl FnOnce(C) -> C2) -> Settings<K, C2> {
        let (extractor, config) = self.0.current();
        Settings::new(Arc::clone(extractor), change(C::clone(config)))
    }
}

impl<K, C> Settings<K, C> {
    /// The settings of the current thread.
    pub(super) fn current(&self) -> &(Arc<K>, Arc<C>) {
        self.0.current()
    }

    pub(super) fn config(&self) -> &C {
        &self.current().1
    }
}

/// Clones an `Arc`: no setting has to be `Clone`.
impl<K, C> Clone for Settings<K, C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
