use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::gate::{KeyExtractor, MissingKey};
use crate::limit::{IsKey, Key};

/// Uses a value from the request's extensions as the key, such as the authenticated user. Created
/// by [`by_extension`].
pub struct ExtensionKey<T> {
    key: Arc<dyn Fn(&T) -> Key + Send + Sync>,
}

/// Uses an extension of the request as the key. `key` converts it to a text, a number, or a
/// [`Key`], which avoids cloning a text.
///
/// ```
/// use tower_redis_ratelimit::extract::{KeyExtractor, PeerIp, by_extension};
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// /// In the extensions of each request that is authenticated.
/// #[derive(Clone)]
/// struct User {
///     id: u64,
///     team: String,
/// }
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let by_team = by_extension(|user: &User| Key::new(&user.team));
/// // Unauthenticated requests are counted under their address.
/// let by_user = by_extension(|user: &User| user.id).or(PeerIp);
/// let layer = RateLimitLayer::new(LocalStore::default(), by_user, policy);
/// # let _ = (layer, by_team);
/// # Ok(())
/// # }
/// ```
///
/// A closure cannot return a borrowed part of the extension: `user.name.as_str()` fails with "lifetime may not live long
/// enough". Return `Key::new(&user.name)`.
///
/// A request without the extension is reported as a [misconfigured](MissingKey::misconfigured)
/// server, usually one with its layers in the wrong order. If some requests have no such extension
/// by design, add an [`or`](KeyExtractor::or), which reports if none of the first 1,000 has it.
pub fn by_extension<T, K: IsKey>(key: impl Fn(&T) -> K + Send + Sync + 'static) -> ExtensionKey<T> {
    ExtensionKey {
        key: Arc::new(move |extension| key(extension).into()),
    }
}

impl<T: Send + Sync + 'static> KeyExtractor for ExtensionKey<T> {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        let extension = request
            .extensions
            .get()
            .ok_or_else(|| MissingKey::extension(type_name::<T>()))?;
        Ok(self.key_of(extension))
    }
}

impl<T> ExtensionKey<T> {
    /// The key of requests with this extension, for [a single caller's policies](crate::select::Tiers::caller) and for a
    /// [`Limiter`](crate::Limiter).
    pub fn key_of(&self, extension: &T) -> Key {
        (self.key)(extension)
    }
}

/// Clones an `Arc`: `T` does not have to be `Clone`.
impl<T> Clone for ExtensionKey<T> {
    fn clone(&self) -> Self {
        Self {
            key: Arc::clone(&self.key),
        }
    }
}

impl<T> fmt::Debug for ExtensionKey<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExtensionKey")
            .field(&format_args!("{}", type_name::<T>()))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::extract::{Global, HeaderKey, PeerIp};
    use http::Request;

    struct Id<N>(N);

    fn with(extension: impl Clone + Send + Sync + 'static) -> Parts {
        Request::builder()
            .extension(extension)
            .body(())
            .unwrap()
            .into_parts()
            .0
    }

    #[test]
    fn counts_by_texts_and_numbers() {
        let request = with(Arc::new(Id(42_u64)));
        assert_eq!(
            by_extension(|user: &Arc<Id<u64>>| user.0).extract(&request),
            Ok(Key::new("42"))
        );
        assert_eq!(
            by_extension(|user: &Arc<Id<u64>>| user.0.to_string()).extract(&request),
            Ok(Key::new("42"))
        );
        assert_eq!(
            by_extension(|_: &Arc<Id<u64>>| "a team").extract(&request),
            Ok(Key::new("a team"))
        );
        assert_eq!(
            by_extension(|_: &Arc<Id<u64>>| Key::secret("sk")).extract(&request),
            Ok(Key::secret("sk"))
        );
    }

    #[test]
    fn a_missing_extension_explains_the_order() {
        let by_user = by_extension(|user: &Id<u64>| user.0);
        let missing = by_user.extract(&with(())).unwrap_err();
        assert!(missing.is_misconfigured());
        let told = missing.to_string();
        assert!(
            told.contains("extract::extension::tests::Id<u64>` in its extensions"),
            "{told}"
        );
        assert!(
            told.contains("put the layer inside the authentication"),
            "{told}"
        );
        assert!(
            told.contains("an `Arc<T>` in the extensions is another type than `T`"),
            "{told}"
        );
        assert!(
            told.ends_with("guide/pitfalls/index.html#no-extension)"),
            "{told}"
        );
    }

    #[test]
    fn a_second_choice_counts_the_others() {
        let address: std::net::IpAddr = "192.0.2.7".parse().unwrap();
        let by_user = by_extension(|user: &Arc<Id<u64>>| user.0).or(PeerIp);
        let mut request = with(address);
        assert_eq!(by_user.extract(&request), Ok(Key::ip(address)));
        request.extensions.insert(Arc::new(Id(42_u64)));
        assert_eq!(by_user.extract(&request), Ok(Key::new("42")));

        let by_header = || HeaderKey::new("x-api-key").unwrap();
        assert_eq!(by_header().or(Global).extract(&with(())), Ok(Key::GLOBAL));
        let neither = by_user.or(by_header()).extract(&with(())).unwrap_err();
        assert!(
            neither.is_misconfigured(),
            "the server recorded no address: {neither}"
        );
        let neither = by_extension(|user: &Id<u64>| user.0)
            .or(by_header())
            .extract(&with(()))
            .unwrap_err();
        assert_eq!(neither.to_string(), "the header x-api-key is missing");
    }

    #[test]
    fn invalid_keys_have_no_fallback() {
        let twice = Request::builder()
            .header("x-api-key", "a")
            .header("x-api-key", "b")
            .body(())
            .unwrap();
        let by_header = HeaderKey::new("x-api-key").unwrap().or(Global);
        let malformed = by_header.extract(&twice.into_parts().0).unwrap_err();
        assert!(!malformed.is_absent());
        assert!(
            PeerIp
                .or(Global)
                .extract(&with(()))
                .unwrap_err()
                .is_misconfigured()
        );
    }
}
