use crate::limit::Key;

/// The key that an extractor makes of a value, for [policies of single callers](crate::select::Tiers::caller) and for a
/// [`Limiter`](crate::Limiter): whatever the extractor does to it, what is written there is what requests have.
///
/// ```
/// use std::net::IpAddr;
/// use tower_redis_ratelimit::extract::{ClientIp, HeaderKey, KeyOf};
/// use tower_redis_ratelimit::select::Tiers;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
/// let caller = (ClientIp::x_forwarded_for().trust(["private"])?.ipv6_prefix(56)?, HeaderKey::new("x-api-key")?);
/// let office: IpAddr = "2001:db8::7".parse()?;
/// let tiers = Tiers::new(policy("free", 60)?).caller(caller.key_of((office, "sk-live-1")), policy("large", 100_000)?);
/// let layer = RateLimitLayer::new(LocalStore::default(), caller, tiers);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
///
/// | extractor | of |
/// |---|---|
/// | [`HeaderKey`](crate::extract::HeaderKey) | the header's value |
/// | [`PeerIp`](crate::extract::PeerIp), [`ClientIp`](crate::extract::ClientIp) | an [`IpAddr`](std::net::IpAddr) |
/// | [`by_extension`](crate::extract::by_extension) | a reference to the extension |
/// | a tuple of these | a tuple of these |
pub trait KeyOf<V> {
    /// The key of requests with this value.
    fn key_of(&self, value: V) -> Key;
}

macro_rules! tuples {
    ($(($($extractor:ident $value:ident $part:ident $of:ident),+);)+) => {$(
        impl<$($value, $extractor: KeyOf<$value>),+> KeyOf<($($value,)+)> for ($($extractor,)+) {
            fn key_of(&self, ($($of,)+): ($($value,)+)) -> Key {
                let ($($part,)+) = self;
                Key::tuple(&[$($part.key_of($of)),+])
            }
        }
    )+};
}

tuples! {
    (A U a u, B V b v);
    (A U a u, B V b v, C W c w);
    (A U a u, B V b v, C W c w, D X d x);
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::*;
    use crate::gate::KeyExtractor;
    use crate::middleware::extract::{ClientIp, HeaderKey, PeerIp, by_extension};
    use http::Request;

    #[test]
    fn is_the_key_that_requests_have() {
        #[derive(Clone)]
        struct User(u64);

        let address: SocketAddr = "[2001:db8::7]:1".parse().unwrap();
        let request = Request::builder().header("x-api-key", " sk-1 ").extension(address).extension(User(42));
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
        let two = (PeerIp, secret());
        assert_eq!(two.extract(&request), Ok(two.key_of((ip, "sk-1"))));
        let three = (by_user, PeerIp, secret());
        assert_eq!(three.extract(&request), Ok(three.key_of((&User(42), ip, "sk-1"))));
        let four = (three, PeerIp, PeerIp, secret());
        assert_eq!(four.extract(&request), Ok(four.key_of(((&User(42), ip, "sk-1"), ip, ip, "sk-1"))));
    }
}
