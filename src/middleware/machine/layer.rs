use std::fmt;
use std::sync::{Arc, OnceLock};

use super::service::Limit;
use crate::gate::{Gate, KeyExtractor};
use crate::observe::{Observer, shared_observer};
use crate::store::Store;
use crate::util::Copies;

/// The settings of a layer for requests with the head `H`, which the services of its clones share.
pub(in crate::middleware) struct LimitLayer<S, K, H, P> {
    shared: Arc<SharedLayer<S, K, H, P>>,
}

struct SharedLayer<S, K, H, P> {
    extractor: Arc<K>,
    config: Config<S, H, P>,
    /// The settings that all services share, created for the first one.
    services: OnceLock<ServiceSettings<S, K, H, P>>,
}

/// The settings of a layer, without its extractor.
pub(in crate::middleware) struct Config<S, H, P> {
    pub(in crate::middleware) gate: Gate<S, H>,
    pub(in crate::middleware) protocol: P,
}

/// The settings of a service. The extractor has its own `Arc`, because the future of a request needs
/// the [`Config`] only.
pub(super) type ServiceSettings<S, K, H, P> = Copies<(Arc<K>, Arc<Config<S, H, P>>)>;

impl<S, K, H, P> LimitLayer<S, K, H, P> {
    pub(in crate::middleware) fn new(extractor: Arc<K>, config: Config<S, H, P>) -> Self {
        Self {
            shared: Arc::new(SharedLayer {
                extractor,
                config,
                services: OnceLock::new(),
            }),
        }
    }
}

impl<S: Clone, K, H: 'static, P: Clone> LimitLayer<S, K, H, P> {
    pub(in crate::middleware) fn observer(self, observer: impl Observer) -> Self
    where
        S: Store,
        K: KeyExtractor<H>,
    {
        let observer = shared_observer(observer);
        self.shared.extractor.observe(&observer);
        self.change(|config| config.gate.observe(observer))
    }

    pub(in crate::middleware) fn change(self, change: impl FnOnce(&mut Config<S, H, P>)) -> Self {
        self.change_to(|mut config| {
            change(&mut config);
            config
        })
    }

    pub(in crate::middleware) fn change_to<P2>(
        self,
        change: impl FnOnce(Config<S, H, P>) -> Config<S, H, P2>,
    ) -> LimitLayer<S, K, H, P2> {
        let extractor = Arc::clone(&self.shared.extractor);
        let mut config = match Arc::try_unwrap(self.shared) {
            Ok(shared) => shared.config,
            // Clones of the layer keep their settings.
            Err(shared) => shared.config.clone(),
        };
        // Another layer with its own mistakes: reports of the former one must not silence these.
        config.gate.notifier = config.gate.notifier.with_fresh_limits();
        LimitLayer::new(extractor, change(config))
    }

    /// # Panics
    ///
    /// If the layer does not see requests end, and a policy limits requests in flight.
    pub(in crate::middleware) fn layer<T>(&self, inner: T) -> Limit<T, S, K, H, P> {
        let SharedLayer {
            extractor,
            config,
            services,
        } = &*self.shared;
        config.gate.assert_countable();
        config.gate.report_shared_count();
        // Once for all services: a router calls this for each of its routes.
        let settings = services
            .get_or_init(|| Copies::new(|| (Arc::clone(extractor), Arc::new(config.clone()))));
        Limit::new(inner, settings.clone())
    }
}

impl<S: fmt::Debug, K, H, P> LimitLayer<S, K, H, P> {
    /// Formats the public layer `name`.
    pub(in crate::middleware) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.config.gate.fmt(name, f)
    }
}

/// By hand, since deriving it requires that the head of a request is `Clone`.
impl<S: Clone, H: 'static, P: Clone> Clone for Config<S, H, P> {
    fn clone(&self) -> Self {
        Self {
            gate: self.gate.clone(),
            protocol: self.protocol.clone(),
        }
    }
}

/// Shares the settings, so that no part of them has to be `Clone`.
impl<S, K, H, P> Clone for LimitLayer<S, K, H, P> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}
