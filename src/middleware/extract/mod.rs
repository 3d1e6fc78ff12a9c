//! Extractors of keys from HTTP requests.

mod client_ip;
mod extension;
mod header;
mod peer;
#[cfg(feature = "axum")]
mod route;

pub use crate::gate::{Global, KeyExtractor, MissingKey, Or, key_fn};
pub use client_ip::{ClientIp, ClientIpBuilder};
pub use extension::{ExtensionKey, by_extension};
pub use header::HeaderKey;
pub use peer::PeerIp;
#[cfg(feature = "axum")]
pub use route::{MatchedEndpoint, MatchedRoute};

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::*;
    use crate::gate::{Global, KeyExtractor, key_fn};
    use crate::limit::Key;
    use http::Request;
    use http::request::Parts;

    fn request(header: &[u8]) -> Parts {
        Request::builder()
            .uri("/books")
            .header("x-user", header)
            .body(())
            .unwrap()
            .into_parts()
            .0
    }

    #[test]
    fn closures_and_tuples_are_extractors() {
        let by_path = key_fn(|request| Some(Key::new(request.uri.path())));
        let parts = request(b"alice");
        assert_eq!(by_path.extract(&parts), Ok(Key::new("/books")));
        let both = (by_path, HeaderKey::new("x-user").unwrap().readable());
        assert_eq!(
            both.extract(&parts),
            Ok(Key::tuple(&[Key::new("/books"), Key::new("alice")]))
        );
        let nobody = |_: &Parts| None;
        assert!((Global, nobody).extract(&parts).is_err());
        assert_eq!(Global.extract(&parts), Ok(Key::GLOBAL));
    }

    #[test]
    fn key_of_is_the_key_that_requests_have() {
        #[derive(Clone)]
        struct User(u64);

        let address: SocketAddr = "[2001:db8::7]:1".parse().unwrap();
        let request = Request::builder()
            .header("x-api-key", " sk-1 ")
            .extension(address)
            .extension(User(42));
        let request = request.body(()).unwrap().into_parts().0;
        let ip: IpAddr = "2001:db8::8".parse().unwrap();
        let secret = || HeaderKey::new("x-api-key").unwrap();
        let by_user = by_extension(|user: &User| user.0);

        for extractor in [secret(), secret().readable()] {
            assert_eq!(extractor.extract(&request), Ok(extractor.key_of("sk-1")));
            assert_eq!(extractor.extract(&request), Ok(extractor.key_of(" sk-1")));
        }
        for prefix in [48, 64] {
            let client = ClientIp::peer().ipv6_prefix(prefix).unwrap();
            assert_eq!(client.extract(&request), Ok(client.key_of(ip)));
        }
        assert_eq!(by_user.extract(&request), Ok(by_user.key_of(&User(42))));
        let [user, peer, header] = [
            by_user.key_of(&User(42)),
            PeerIp.key_of(ip),
            secret().key_of("sk-1"),
        ];
        assert_eq!(
            (PeerIp, secret()).extract(&request),
            Ok(Key::tuple(&[peer, header]))
        );
        let three = (by_user, PeerIp, secret());
        assert_eq!(
            three.extract(&request),
            Ok(Key::tuple(&[user, peer, header]))
        );
        let four = (three, PeerIp, PeerIp, secret());
        let nested = Key::tuple(&[user, peer, header]);
        assert_eq!(
            four.extract(&request),
            Ok(Key::tuple(&[nested, peer, peer, header]))
        );
    }
}
