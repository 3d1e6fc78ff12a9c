//! Extractors of keys from HTTP requests.

mod client_ip;
mod extension;
mod header;
mod ip;
mod key_of;
mod peer;
#[cfg(feature = "axum")]
mod route;

pub use crate::gate::{Global, KeyExtractor, MissingKey, Or, key_fn};
pub use client_ip::{ClientIp, ClientIpBuilder};
pub use extension::{ExtensionKey, by_extension};
pub use header::HeaderKey;
pub use ip::PeerIp;
pub use key_of::KeyOf;
#[cfg(feature = "axum")]
pub use route::{MatchedEndpoint, MatchedRoute};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{Global, KeyExtractor, key_fn};
    use crate::limit::Key;
    use http::Request;
    use http::request::Parts;

    fn request(header: &[u8]) -> Parts {
        Request::builder().uri("/books").header("x-user", header).body(()).unwrap().into_parts().0
    }

    #[test]
    fn closures_and_tuples_are_extractors() {
        let by_path = key_fn(|request| Some(Key::new(request.uri.path())));
        let parts = request(b"alice");
        assert_eq!(by_path.extract(&parts), Ok(Key::new("/books")));
        let both = (by_path, HeaderKey::new("x-user").unwrap().readable());
        assert_eq!(both.extract(&parts), Ok(Key::tuple(&[Key::new("/books"), Key::new("alice")])));
        let nobody = |_: &Parts| None;
        assert!((Global, nobody).extract(&parts).is_err());
        assert_eq!(Global.extract(&parts), Ok(Key::GLOBAL));
    }
}
