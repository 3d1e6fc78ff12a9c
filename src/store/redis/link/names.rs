//! Addresses of host names.
//!
//! A lookup by the operating system blocks a thread, for many seconds if no name server responds,
//! and cannot be cancelled. So at most one thread at a time looks up a host, and all callers that
//! need its addresses share that lookup. The thread belongs to no runtime: its waiters may be on
//! several, and one that shuts down must not wait for it.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread;

use futures_util::FutureExt;
use futures_util::future::Shared;
use redis::RedisFuture;
use redis::io::AsyncDNSResolver;
use tokio::sync::oneshot;

use crate::util::lock;

static LOOKUPS: Lookups = Lookups {
    running: Mutex::new(BTreeMap::new()),
    look_up: system,
};

struct Lookups {
    running: Mutex<BTreeMap<Box<str>, Lookup>>,
    look_up: fn(&str) -> io::Result<Vec<SocketAddr>>,
}

type Lookup = Shared<oneshot::Receiver<Result<Vec<SocketAddr>, Arc<io::Error>>>>;

/// Returns the addresses of a host, which may be an address itself.
///
/// # Errors
///
/// The operating system's error, or "not found" if there are no addresses.
pub(crate) async fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = match host.parse::<IpAddr>() {
        Ok(address) => vec![SocketAddr::new(address, port)],
        Err(_) => LOOKUPS.find(host).await?,
    };
    addresses
        .iter_mut()
        .for_each(|address| address.set_port(port));
    Ok(addresses)
}

fn system(host: &str) -> io::Result<Vec<SocketAddr>> {
    #[cfg(test)]
    tests::hang(host);
    let addresses: Vec<_> = (host, 0).to_socket_addrs()?.collect();
    // An empty list would make redis-rs panic.
    if addresses.is_empty() {
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the host has no address",
        ))
    } else {
        Ok(addresses)
    }
}

impl Lookups {
    async fn find(&'static self, host: &str) -> io::Result<Vec<SocketAddr>> {
        let found = self.begin(host)?.await.map_err(io::Error::other)?;
        found.map_err(|error| io::Error::new(error.kind(), error))
    }

    /// Joins the running lookup, or starts one.
    fn begin(&'static self, host: &str) -> io::Result<Lookup> {
        let mut running = lock(&self.running);
        if let Some(lookup) = running.get(host) {
            return Ok(lookup.clone());
        }
        let (sender, lookup) = oneshot::channel();
        let lookup = lookup.shared();
        let name: Box<str> = host.into();
        thread::Builder::new()
            .name("redis-host".to_owned())
            .spawn(move || {
                let found = (self.look_up)(&name).map_err(Arc::new);
                lock(&self.running).remove(&name);
                // Fails if all waiters have been dropped.
                let _ = sender.send(found);
            })?;
        running.insert(host.into(), lookup.clone());
        Ok(lookup)
    }
}

/// Resolves to the addresses of this host, ignoring the requested name.
pub(crate) struct Host(pub(crate) String);

impl AsyncDNSResolver for Host {
    fn resolve<'a, 'b: 'a>(
        &'a self,
        _name: &'b str,
        port: u16,
    ) -> RedisFuture<'a, Box<dyn Iterator<Item = SocketAddr> + Send + 'a>> {
        Box::pin(async move {
            let found = addresses(&self.0, port).await?;
            Ok(Box::new(found.into_iter()) as Box<dyn Iterator<Item = _> + Send>)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Duration;

    use futures_util::FutureExt;
    use tokio::time::timeout;

    use super::*;
    use crate::store::{ErrorKind, RedisStore};
    use crate::support::until;

    const HANGS: &str = "hangs.invalid";

    /// As if no name server responded.
    pub(super) fn hang(host: &str) {
        if host == HANGS {
            loop {
                thread::park();
            }
        }
    }

    #[tokio::test]
    async fn a_lookup_is_a_part_of_the_time_to_connect() {
        for (url, text) in [
            (format!("redis://{HANGS}"), "took longer than"),
            (format!("redis+cluster://{HANGS}"), ""),
            (
                format!("redis+sentinel://{HANGS}/mymaster"),
                "took longer than",
            ),
        ] {
            let builder = RedisStore::builder(&url).timeout(Duration::from_millis(200));
            let builder = builder.connect_timeout(Duration::from_millis(400));
            let connecting = timeout(Duration::from_secs(20), builder.connect());
            let error = connecting.await.expect("it ends").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{url}: {error}");
            assert!(error.to_string().contains(text), "{url}: {error}");
        }
    }

    /// While no name server responds, waiters that give up must not leave lookups behind.
    #[tokio::test]
    async fn a_host_has_one_lookup_in_progress() {
        static HANGS: Mutex<bool> = Mutex::new(true);
        static ANSWERED: Condvar = Condvar::new();
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static LOOKUPS: Lookups = Lookups {
            running: Mutex::new(BTreeMap::new()),
            look_up: |host| {
                COUNT.fetch_add(1, SeqCst);
                drop(ANSWERED.wait_while(lock(&HANGS), |hangs| *hangs));
                match host {
                    "none" => Err(io::Error::new(io::ErrorKind::NotFound, "no such host")),
                    _ => Ok(vec![SocketAddr::from(([127, 0, 0, 1], 0))]),
                }
            },
        };
        for _ in 0..100 {
            for host in ["some", "none"] {
                assert!(
                    timeout(Duration::from_millis(1), LOOKUPS.find(host))
                        .await
                        .is_err()
                );
            }
        }
        let mut waiting = pin!(LOOKUPS.find("none"));
        assert!(waiting.as_mut().now_or_never().is_none());
        *lock(&HANGS) = false;
        ANSWERED.notify_all();
        let error = waiting.await.unwrap_err();
        assert!(
            error.kind() == io::ErrorKind::NotFound && error.to_string() == "no such host",
            "{error:?}"
        );
        until("both have ended", async || {
            lock(&LOOKUPS.running).is_empty()
        })
        .await;
        assert_eq!(COUNT.load(SeqCst), 2, "lookups of two hosts");
        // No result is cached.
        assert_eq!(LOOKUPS.find("some").await.unwrap().len(), 1);
        assert_eq!(COUNT.load(SeqCst), 3);
    }

    #[tokio::test]
    async fn an_address_is_not_looked_up() {
        for address in ["127.0.0.1", "::1"] {
            assert_eq!(
                addresses(address, 7).await.unwrap(),
                [SocketAddr::new(address.parse().unwrap(), 7)]
            );
        }
        assert!(
            addresses("localhost", 7)
                .await
                .unwrap()
                .iter()
                .all(|address| address.port() == 7)
        );
    }
}
