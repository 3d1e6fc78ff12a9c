//! The network between instances and their store, in a time that the simulation moves.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Policy, State, Verdicts};
use crate::util::lock;

pub(crate) type Reply = Result<Decision, StoreError>;

/// The store of a run and the network to it, shared by all instances.
#[derive(Debug)]
pub(crate) struct Shared<W>(Arc<Mutex<W>>);

/// The far end of a network, and its records.
pub(crate) trait Remote {
    fn network(&mut self) -> &mut Network;

    /// Executes a request in the store.
    fn runs(&mut self, request: &Request) -> Decision;

    /// Records a request that was abandoned before it was sent.
    fn is_withdrawn(&mut self, _: &Request) {}

    /// Records a reply that is about to be delivered.
    fn replies(&mut self, request: &Request, reply: &Reply);
}

/// The requests on their way. The unit of time is the simulation's.
#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Time since the start.
    pub(crate) now: u64,
    /// By the time of their next event, then by the order of its creation.
    requests: BTreeMap<(u64, u64), Box<Request>>,
    made: u64,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) instance: usize,
    pub(crate) check: Check,
    fate: Fate,
    pub(crate) next: NetworkEvent,
    to: oneshot::Sender<Reply>,
}

/// The fate of a request.
#[derive(Debug, Clone)]
pub(crate) struct Fate {
    /// Time in the queue. A request that is abandoned in that time is not sent.
    pub(crate) queued: u64,
    /// Time from leaving the queue until it runs.
    pub(crate) sent: u64,
    /// Whether it runs: `false` if it is lost on its way to the store.
    pub(crate) runs: bool,
    /// Time from running until the reply.
    pub(crate) back: u64,
    /// The error that the sender gets, whether the request runs or not.
    pub(crate) error: Option<StoreError>,
}

/// The next event of a request.
#[derive(Debug)]
pub(crate) enum NetworkEvent {
    /// It leaves the queue, unless its sender has abandoned it.
    Leaves,
    Runs,
    IsAnswered(Reply),
}

impl Request {
    /// Returns `true` if its future was dropped.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.to.is_closed()
    }
}

impl Network {
    /// Accepts a request.
    pub(crate) fn send(&mut self, instance: usize, check: Check, fate: Fate) -> Waiting {
        let (to, reply) = oneshot::channel();
        let (after, next) = match fate.queued {
            0 => (fate.sent, NetworkEvent::Runs),
            queued => (queued, NetworkEvent::Leaves),
        };
        let request = Request {
            instance,
            check,
            fate,
            next,
            to,
        };
        self.will(after, Box::new(request));
        Waiting(reply)
    }

    /// The requests on their way.
    pub(crate) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.values().map(|request| &**request)
    }

    fn will(&mut self, after: u64, request: Box<Request>) {
        self.made += 1;
        self.requests.insert((self.now + after, self.made), request);
    }

    /// Removes the request whose next event is due first, if that is at `until`.
    fn next(&mut self, until: u64) -> Option<Box<Request>> {
        let first = self.requests.first_entry();
        let Some(first) = first.filter(|first| first.key().0 <= until) else {
            self.now = until;
            return None;
        };
        // An event may have been due before the runtime that created it ran.
        self.now = first.key().0.max(self.now);
        Some(first.remove())
    }
}

impl<W> Shared<W> {
    pub(crate) fn new(state: W) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, W> {
        lock(&self.0)
    }
}

impl<W> Clone for Shared<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W: Remote> Shared<W> {
    /// Executes all events that are due at `until`.
    pub(crate) fn passes_to(&self, until: u64) {
        loop {
            let mut state = self.state();
            let Some(mut request) = state.network().next(until) else {
                return;
            };
            let after = match request.next {
                NetworkEvent::Leaves if request.is_abandoned() => {
                    state.is_withdrawn(&request);
                    continue;
                }
                NetworkEvent::Leaves => {
                    request.next = NetworkEvent::Runs;
                    request.fate.sent
                }
                NetworkEvent::Runs => {
                    let decision = request.fate.runs.then(|| state.runs(&request));
                    let error = request.fate.error.take().map(Err);
                    request.next = NetworkEvent::IsAnswered(error.or(decision.map(Ok)).unwrap());
                    request.fate.back
                }
                NetworkEvent::IsAnswered(ref reply) => {
                    state.replies(&request, reply);
                    // Send without the lock: the receiver may send another request immediately.
                    drop(state);
                    let Request { to, next, .. } = *request;
                    if let NetworkEvent::IsAnswered(reply) = next {
                        let _ = to.send(reply);
                    }
                    continue;
                }
            };
            state.network().will(after, request);
        }
    }
}

/// The future of a reply.
pub(crate) struct Waiting(oneshot::Receiver<Reply>);

impl Future for Waiting {
    type Output = Reply;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Reply> {
        Pin::new(&mut self.0).poll(cx).map(Result::unwrap)
    }
}

/// The counts of a store, by caller and list of policies.
#[derive(Debug, Default)]
pub(crate) struct Counts(HashMap<(Key, Vec<u64>), Vec<State>>);

impl Counts {
    /// Decides a check at a time of the store's clock.
    pub(crate) fn decide(&mut self, check: &Check, now: i64) -> Verdicts {
        let policies = check.policies();
        let fresh = || policies.iter().map(|policy| State::fresh(policy.kind()));
        let place = (*check.key(), policies.iter().map(Policy::id).collect());
        let states = self.0.entry(place).or_insert_with(|| fresh().collect());
        check.decide(states, now)
    }
}
