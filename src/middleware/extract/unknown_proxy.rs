//! Notices a proxy that the extractor does not trust: all of its clients share one count.

use std::slice;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use http::HeaderName;
use http::header::FORWARDED;
use http::request::Parts;

use super::peer::{Peer, is_private};
use crate::observe::mistakes::UNKNOWN_PROXY;
use crate::observe::{Observer, event, or_log};

/// Reports the first request of such a proxy.
pub(super) struct UnknownProxy {
    observer: OnceLock<Arc<dyn Observer>>,
    reported: AtomicBool,
}

/// One for the process: [`PeerIp`](super::PeerIp) has no state, and the same proxies are in front of all layers.
pub(super) static UNKNOWN_PROXIES: UnknownProxy = UnknownProxy::new();

/// The headers that a proxy sends.
static HEADERS: [HeaderName; 2] = [HeaderName::from_static("x-forwarded-for"), FORWARDED];

impl UnknownProxy {
    const fn new() -> Self {
        Self {
            observer: OnceLock::new(),
            reported: AtomicBool::new(false),
        }
    }

    /// Keeps the first observer.
    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    /// Checks a request that is counted by its peer. `header` is the header that the extractor reads, or `None` for no header. A
    /// peer with a public address may be a client that forges the header, so it is not reported.
    #[inline]
    pub(super) fn notice(&self, peer: Peer, request: &Parts, header: Option<&HeaderName>) {
        let is_near = match peer {
            Peer::Address(address) => is_private(address),
            Peer::Unix => true,
            Peer::Unknown => false,
        };
        if is_near && !self.reported.load(Relaxed) {
            self.check(peer, request, header);
        }
    }

    fn check(&self, peer: Peer, request: &Parts, header: Option<&HeaderName>) {
        let headers = header.map_or(&HEADERS[..], slice::from_ref);
        let sent = headers
            .iter()
            .find(|header| request.headers.contains_key(*header));
        let Some(sent) = sent else { return };
        if self.reported.swap(true, Relaxed) {
            return;
        }
        let (peer, trusted) = match peer {
            Peer::Address(address) => (format!("the peer {address}"), address.to_string()),
            Peer::Unix | Peer::Unknown => {
                ("the peer on a unix socket".to_owned(), "unix".to_owned())
            }
        };
        let fix = match header {
            Some(_) => format!("trust it, as in `.trust([{trusted:?}])`"),
            None => {
                let of_header = match *sent == FORWARDED {
                    true => "forwarded",
                    false => "x_forwarded_for",
                };
                format!("count by `ClientIp::{of_header}().trust([{trusted:?}])?`")
            }
        };
        let problem = format!(
            "{peer} sends `{sent}`, so it is probably a proxy, and all of its clients share one count: {fix}, or ignore this if the \
             peer is to be counted{UNKNOWN_PROXY}"
        );
        or_log(self.observer.get()).misconfigured(&event::Misconfigured::new(&problem));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::Request;

    use super::*;

    #[derive(Default)]
    struct Problems(Mutex<Vec<String>>);

    impl Observer for Problems {
        fn misconfigured(&self, event: &event::Misconfigured<'_>) {
            self.0.lock().unwrap().push(event.problem.to_owned());
        }
    }

    fn address(text: &str) -> Peer {
        Peer::Address(text.parse().unwrap())
    }

    /// Returns the reports of two equal requests.
    fn reports(peer: Peer, sent: &str, read: Option<&HeaderName>) -> Vec<String> {
        let (proxies, problems) = (UnknownProxy::new(), Arc::new(Problems::default()));
        let observer: Arc<dyn Observer> = problems.clone();
        proxies.observe(&observer);
        let request = Request::builder().header(sent, "203.0.113.7");
        let request = request.body(()).unwrap().into_parts().0;
        for _ in 0..2 {
            proxies.notice(peer, &request, read);
        }
        problems.0.lock().unwrap().clone()
    }

    #[test]
    fn an_untrusted_proxy_is_reported_once() {
        let real_ip = HeaderName::from_static("x-real-ip");
        let cases = [
            (
                address("10.0.0.9"),
                "X-Forwarded-For",
                None,
                "the peer 10.0.0.9 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: count by \
                 `ClientIp::x_forwarded_for().trust([\"10.0.0.9\"])?`, or",
            ),
            (
                address("::1"),
                "forwarded",
                None,
                "the peer ::1 sends `forwarded`, so it is probably a proxy, and all of its clients share one count: count by \
                 `ClientIp::forwarded().trust([\"::1\"])?`, or",
            ),
            (
                Peer::Unix,
                "x-real-ip",
                Some(&real_ip),
                "the peer on a unix socket sends `x-real-ip`, so it is probably a proxy, and all of its clients share one count: trust it, \
                 as in `.trust([\"unix\"])`, or",
            ),
        ];
        for (peer, sent, read, expected) in cases {
            let reports = reports(peer, sent, read);
            let [report] = &reports[..] else {
                panic!("one report is expected: {reports:?}");
            };
            assert!(report.starts_with(expected), "{report}");
            assert!(report.ends_with("#unknown-proxy)"), "{report}");
        }
    }

    #[test]
    fn possible_clients_are_not_reported() {
        let real_ip = HeaderName::from_static("x-real-ip");
        let cases = [
            (address("203.0.113.7"), "x-forwarded-for", None),
            (address("10.0.0.9"), "x-real-ip", None),
            (address("10.0.0.9"), "x-forwarded-for", Some(&real_ip)),
            (Peer::Unknown, "x-forwarded-for", None),
        ];
        for (peer, sent, read) in cases {
            assert_eq!(reports(peer, sent, read), [""; 0], "{peer:?} {sent}");
        }
    }
}
