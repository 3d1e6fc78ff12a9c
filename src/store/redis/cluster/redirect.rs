//! What becomes of a call that a node has refused because of how the slots are spread. It did not run the call.

use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind as Kind, RedisError, ServerErrorKind};
use tokio::time::Instant;

use super::Cluster;
use super::refresh::Why;
use crate::store::clock::instant;
use crate::store::redis::errors::{error_of, not_ready};
use crate::store::redis::future::Job;
use crate::store::redis::inner::Inner;
use crate::store::redis::transport::Node;

/// How a check goes on after such a refusal.
#[derive(Debug, Default)]
pub(in super::super) struct Redirect {
    /// The node to which the slot is being moved: it takes the check now, though the slot is not yet its own.
    pub(in super::super) ask: Option<Node>,
    /// Since when it has been refused for good reason only to be tried again.
    waits: Option<Instant>,
    /// How often it was sent elsewhere.
    hops: u8,
}

/// What a node means by a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Refusal {
    /// Another node serves the slot.
    Moved {
        slot: u16,
        node: Node,
    },
    /// The keys are not here, but on the node to which the slot is being moved.
    Ask(Node),
    /// Some of the keys are here and some are there.
    TryAgain,
    /// Nobody decides just now.
    NotReady,
    Other,
}

/// After so many nodes that all send us elsewhere.
const MAX_HOPS: u8 = 8;
/// How long a check waits for its own keys to be on one node: less than the deadline of a fallback, which should not take it
/// for an outage.
const PATIENCE: Duration = Duration::from_millis(30);

impl Cluster {
    /// What the node that was asked means by an error.
    pub(in super::super) fn refusal(&self, error: &RedisError, asked: Node) -> Refusal {
        let elsewhere = || {
            let (address, slot) = error.redirect_node()?;
            let (host, port) = address.rsplit_once(':')?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let address = self.address(asked)?.sibling(host, port.parse().ok().filter(|port| *port > 0)?);
            (host != "?").then(|| (slot, self.number(address)))
        };
        match error.kind() {
            Kind::Server(ServerErrorKind::Moved) => match elsewhere() {
                Some((slot, node)) => Refusal::Moved { slot, node },
                None => Refusal::NotReady,
            },
            Kind::Server(ServerErrorKind::Ask) => elsewhere().map_or(Refusal::NotReady, |(_, node)| Refusal::Ask(node)),
            Kind::Server(ServerErrorKind::TryAgain) => Refusal::TryAgain,
            Kind::Server(ServerErrorKind::ClusterDown | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown) => {
                Refusal::NotReady
            }
            _ => Refusal::Other,
        }
    }

    /// Another node serves this slot.
    pub(in super::super) fn learn(&self, slot: u16, node: Node) {
        self.map.rcu(|map| if map.owner(slot) == node { Arc::clone(map) } else { map.with(slot, node).into() });
    }
}

impl Inner {
    /// Puts the checks of a call that a node has refused where they can be decided, or answers them.
    pub(in super::super) fn redirect(self: &Arc<Self>, jobs: Vec<Job>, error: &RedisError, from: Node) {
        let Some(cluster) = self.transport.cluster() else { return };
        let refusal = cluster.refusal(error, from);
        match refusal {
            Refusal::Moved { slot, node } => {
                cluster.learn(slot, node);
                self.refresh(Why::Moved);
            }
            Refusal::Ask(_) | Refusal::TryAgain => jobs.iter().for_each(|job| cluster.notice_move(job.partition)),
            Refusal::NotReady => self.refresh(Why::Lost(from)),
            Refusal::Other => {}
        }
        // Whether it was of one caller alone.
        let alone = jobs.len() == 1 || jobs.iter().all(|job| job.alone);
        let mut again = vec![];
        for mut job in jobs {
            let redirect = job.redirect.get_or_insert_default();
            redirect.ask = None;
            redirect.hops += 1;
            let to = match refusal {
                Refusal::Other => {
                    job.answer(|check| self.decided(check, Err(error_of(error)), 0));
                    continue;
                }
                Refusal::NotReady => None,
                _ if redirect.hops > MAX_HOPS && refusal != Refusal::TryAgain => None,
                Refusal::Moved { node, .. } => Some(node),
                // Each caller by itself is mostly on one node. Redis 6.2 says ASK too where only some of the keys are gone:
                // there, a caller who is still here would be counted anew.
                Refusal::Ask(_) | Refusal::TryAgain if !alone => Some(from),
                Refusal::Ask(node) => {
                    redirect.ask = Some(node);
                    Some(node)
                }
                Refusal::TryAgain => {
                    redirect.hops = 0;
                    let since = *redirect.waits.get_or_insert_with(instant);
                    (since.elapsed() < PATIENCE).then_some(Node::NOWHERE)
                }
            };
            match to {
                Some(node) => again.push((node, job)),
                None => {
                    let error = not_ready(error);
                    job.fail(if refusal == Refusal::TryAgain { error.of_check() } else { error });
                }
            }
        }
        self.requeue(again);
    }

    /// Where a check is decided now.
    pub(in super::super) fn node_of(&self, job: &Job) -> Node {
        let asks = job.redirect.as_ref().and_then(|redirect| redirect.ask);
        asks.unwrap_or_else(|| self.transport.node(job.partition))
    }

    /// A connection to a node has failed like this: another node may take over. Sends on what was not sent there, if
    /// another one has taken over already, and answers the rest.
    pub(in super::super) fn lost(self: &Arc<Self>, jobs: impl Iterator<Item = Job>, node: Node) -> Vec<Job> {
        if self.transport.cluster().is_none() {
            return jobs.collect();
        }
        self.refresh(Why::Lost(node));
        let (left, elsewhere): (Vec<_>, Vec<_>) =
            jobs.partition(|job| [node, Node::NOWHERE].contains(&self.node_of(job)));
        self.requeue(elsewhere.into_iter().map(|job| (self.node_of(&job), job)).collect());
        left
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use redis::{IntoConnectionInfo, parse_redis_value};

    use super::super::Address;
    use super::*;
    use crate::store::redis::dial::Dialer;
    use crate::store::redis::tls::ServerName;
    use crate::store::{ErrorKind, RedisStore, Store};
    use crate::support::{check, until};

    #[test]
    fn a_refusal_is_understood_or_none() {
        let seed = "redis://seed:1".into_connection_info().unwrap();
        let cluster = Cluster::new(vec![seed], Dialer::new(Duration::from_secs(1), ServerName::default()), "rl", 1);
        let asked = cluster.number(Address::new("seed", 1));
        let refusal = |line: &str| {
            let error = parse_redis_value(line.as_bytes()).unwrap().extract_error().unwrap_err();
            cluster.refusal(&error, asked)
        };
        let node = |host, port| cluster.number(Address::new(host, port));
        for (line, expected) in [
            ("-MOVED 3999 b:6381\r\n", Refusal::Moved { slot: 3999, node: node("b", 6381) }),
            ("-MOVED 0 :6381\r\n", Refusal::Moved { slot: 0, node: node("seed", 6381) }),
            ("-MOVED 0 ::1:6381\r\n", Refusal::Moved { slot: 0, node: node("::1", 6381) }),
            ("-ASK 3999 [::1]:6381\r\n", Refusal::Ask(node("::1", 6381))),
            ("-MOVED 3999 ?:6381\r\n", Refusal::NotReady),
            ("-MOVED 3999 b:0\r\n", Refusal::NotReady),
            ("-MOVED 3999 b:port\r\n", Refusal::NotReady),
            ("-MOVED 3999\r\n", Refusal::NotReady),
            ("-MOVED\r\n", Refusal::NotReady),
            ("-MOVED 99999 b:1\r\n", Refusal::NotReady),
            ("-ASK all of it\r\n", Refusal::NotReady),
            ("-TRYAGAIN Multiple keys request during rehashing of slot\r\n", Refusal::TryAgain),
            ("-CLUSTERDOWN The cluster is down\r\n", Refusal::NotReady),
            ("-LOADING Redis is loading the dataset in memory\r\n", Refusal::NotReady),
            ("-CROSSSLOT Keys in request don't hash to the same slot\r\n", Refusal::Other),
            ("-ERR no\r\n", Refusal::Other),
        ] {
            assert_eq!(refusal(line), expected, "{line}");
        }
        // A slot that there is not, of a node that lies.
        cluster.learn(60_000, node("b", 1));
        assert_eq!(cluster.node(0), Node::NOWHERE);
    }

    #[test]
    fn an_error_of_the_store_is_not_lost() {
        let error = parse_redis_value(b"-CLUSTERDOWN Hash slot not served\r\n").unwrap().extract_error().unwrap_err();
        let told = not_ready(&error);
        assert!(told.kind() == ErrorKind::NotReady && told.is_unsent());
    }

    /// As one that waits where it was put first: so a fallback may settle what it grants instead.
    #[tokio::test]
    async fn a_check_that_was_sent_elsewhere_can_be_taken_back() {
        let store = RedisStore::cluster(["redis://127.0.0.1:1"]).unwrap();
        let (job, mut future) = Job::new(check("ann", "10/s"), 0);
        store.inner.requeue(vec![(Node::NOWHERE, job)]);
        assert!(store.withdraw(Pin::new(&mut future)));
        let another = Job::new(check("ann", "10/s"), 0).1;
        assert!(store.inner.queues().have_redirected(another.place));
        until("a worker has dropped it", async || !store.inner.queues().have_redirected(another.place)).await;
    }
}
