use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

use super::MissingKey;
use crate::error::StoreError;
use crate::leases::is_leasable;
use crate::limit::{Check, Decision, JointCheck, JointDecision, Key, KeyForms, Outcome, Policies};
use crate::observe::misses::Misses;
use crate::observe::mistakes::{
    CALL_WITHOUT_READY, CALLER_FORM, CONSTANT_ID, COUNTED_TWICE, DENIED_WITH_SUCCESS,
    GRPC_OVER_HTTP, NEVER_PASSES, NO_COST, NO_ROUTE, NOT_LEASED, ONE_NAME_TWO_QUOTAS,
};
use crate::observe::{Event, Observer, UncountedReason, or_log};
use crate::store::{JointFuture, Store};
use crate::util::{OnceFlag, instant, lock};
use crate::waiters::{ListedLayer, Waiters};

/// Notifies the observer of a layer or limiter. Without an observer, logs problems. Clones share
/// the observer.
#[derive(Clone, Default)]
pub struct Notifier {
    observer: Option<Arc<dyn Observer>>,
    misconfiguration: Arc<Misconfiguration>,
}

/// Limits reports of a misconfigured server to one per minute, since every request finds the same
/// problem.
#[derive(Default)]
struct Misconfiguration {
    reported: Mutex<Option<Instant>>,
    /// A doubly counted request: it may be intended.
    counted_twice: OnceFlag,
    /// A check under a leased policy. The first one shows whether blocks can decide any. A deployment may start with a lease
    /// without effect.
    sent_leased: OnceFlag,
    /// A cost above the burst: clients may choose the cost.
    never_passes: OnceFlag,
    /// The number of requests that were examined.
    examined: AtomicU32,
    /// A status of success for a rejection: every rejection gets it.
    denied_with_success: OnceFlag,
    /// A call without a permit: every call may lack it.
    call_without_ready: OnceFlag,
    /// A proxy that the extractor does not trust.
    unknown_proxy: OnceFlag,
    /// The requests whose peer has a public address and sends the header of a proxy.
    forwarded: Misses,
    /// A request without an address that is counted as a peer on a unix socket.
    no_address: OnceFlag,
    /// A rejection of a gRPC call over HTTP: every rejection is one.
    grpc_over_http: OnceFlag,
    /// A header that does not fit the trusted proxies.
    proxy_header: OnceFlag,
    /// The requests without a route, if the extractor counts by routes.
    routes: Misses,
    /// The requests that cost nothing, if nothing charges them later.
    costs: Misses,
    /// The first id of a request, and the later requests with the same id.
    first_id: OnceLock<Key>,
    same_ids: Misses,
    /// The layer in the list of its store. Its clones add no other entries.
    layer: OnceLock<ListedLayer>,
}

/// Minimum interval between two reports of a misconfigured server.
const PAUSE: Duration = Duration::from_secs(60);

impl Notifier {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Self {
        let misconfiguration = Arc::<Misconfiguration>::default();
        misconfiguration.routes.observe(&observer);
        misconfiguration.costs.observe(&observer);
        misconfiguration.same_ids.observe(&observer);
        misconfiguration.forwarded.observe(&observer);
        Self {
            observer: Some(observer),
            misconfiguration,
        }
    }

    /// Creates the notifier of another layer: the same observer, and no reports yet.
    pub(crate) fn with_fresh_limits(&self) -> Self {
        self.observer.clone().map(Self::new).unwrap_or_default()
    }

    /// Returns the observer that is set.
    pub(super) fn observer(&self) -> Option<&Arc<dyn Observer>> {
        self.observer.as_ref()
    }

    /// Returns the start time of a check, if an observer needs its duration.
    #[inline]
    pub(crate) fn since(&self) -> Option<Instant> {
        self.observer.as_ref().map(|_| instant())
    }

    /// Returns `true` if an observer or the log must be [notified](Self::answered) of this answer.
    #[inline]
    pub(crate) fn is_notified(&self, answer: Result<&Decision, &StoreError>) -> bool {
        self.notifies(matches!(answer, Ok(decision) if decision.is_allowed()))
    }

    /// As [`is_notified`](Self::is_notified), by whether the answer allows the request. By default there is only a log, which
    /// needs denials and errors.
    #[inline]
    pub(super) fn notifies(&self, is_allowed: bool) -> bool {
        self.observer.is_some() || !is_allowed
    }

    /// Notifies the observer of the reply to a check of this cost, sent at [`since`](Self::since).
    #[inline(never)]
    pub(crate) fn answered(
        &self,
        key: &Key,
        cost: u32,
        since: Option<Instant>,
        answer: &Result<Decision, StoreError>,
        dry_run: bool,
    ) {
        let observer = self.observer.as_ref();
        match answer {
            Ok(decision) => {
                if decision.outcome() == Outcome::ExceedsCapacity {
                    self.never_passes(cost, decision);
                }
                // Without an observer, nothing else would show a dry run.
                if observer.is_some() || dry_run && !decision.is_allowed() {
                    let waited = since.map_or(Duration::ZERO, |since| instant() - since);
                    or_log(observer).notify(&Event::Decided {
                        key,
                        decision,
                        elapsed: waited,
                        dry_run,
                    });
                }
            }
            Err(error) => {
                or_log(observer).notify(&Event::Failed {
                    key: Some(key),
                    error,
                    unanswered: !dry_run,
                });
            }
        }
    }

    /// Like [`answered`](Self::answered), for a check of several keys, which is reported under the key of the deciding
    /// policy.
    pub(crate) fn joint_answered(
        &self,
        joint: &JointCheck,
        since: Option<Instant>,
        answer: &Result<JointDecision, StoreError>,
        dry_run: bool,
    ) {
        let whole = answer.as_ref().map(JointDecision::decision);
        if !self.is_notified(whole) {
            return;
        }
        let key = match answer {
            Ok(decided) => decided.decider(joint),
            Err(_) => joint.first().key(),
        };
        let whole = whole.cloned().map_err(StoreError::clone);
        self.answered(key, joint.cost(), since, &whole, dry_run);
    }

    /// Reports that the store failed a check that no request waits for.
    #[cold]
    pub(crate) fn failed(&self, key: &Key, error: &StoreError) {
        or_log(self.observer.as_ref()).notify(&Event::Failed {
            key: Some(key),
            error,
            unanswered: false,
        });
    }

    /// Reports a missing key if the server is at fault.
    pub(crate) fn missing(&self, missing: &MissingKey) {
        if missing.is_misconfigured() {
            self.misconfigured(missing);
        }
    }

    /// Notifies the observer of a request that is not counted. Without an observer, only the log of missing keys is
    /// needed.
    #[cold]
    pub(crate) fn uncounted(&self, reason: UncountedReason<'_>, allowed: bool) {
        if self.observer.is_some() || matches!(reason, UncountedReason::NoKey(_)) {
            or_log(self.observer.as_ref()).notify(&Event::Uncounted { reason, allowed });
        }
    }

    /// Reports a misconfigured server, at most once a minute.
    pub(crate) fn misconfigured(&self, problem: impl fmt::Display) {
        if self.misconfiguration.is_due() {
            self.report(&problem.to_string());
        }
    }

    /// Reports, once, that an outer layer has already counted a request under a policy of this
    /// layer.
    pub(crate) fn counted_twice(&self, outer: &Decision, inner: &Decision) {
        // Policies of one name and strategy share a count, even if their quotas differ.
        let both = inner.policies().iter().find(|inner| {
            outer
                .policies()
                .iter()
                .any(|outer| outer.id() == inner.id())
        });
        if let Some(policy) = both
            && self.misconfiguration.counted_twice.claim()
        {
            let name = policy.name();
            self.report(&format!(
                "policy {name:?} charged a request twice: the layer is installed twice, or two layers use this policy; \
                 remove one, or rename its policy{COUNTED_TWICE}"
            ));
        }
    }

    /// Reports, once, a cost above the burst, for which no wait makes room.
    #[cold]
    fn never_passes(&self, cost: u32, decision: &Decision) {
        let mut each = decision.policies().whole().iter();
        let policy = each.find(|policy| policy.quota().capacity() < cost && !policy.is_blocked());
        if let Some(policy) = policy
            && self.misconfiguration.never_passes.claim()
        {
            let burst = policy.quota().capacity();
            self.report(&format!(
                "a request costs {cost}, the burst of the policy {:?} is {burst}, and so the request never passes: raise \
                 the burst, or lower the cost{NEVER_PASSES}",
                policy.name()
            ));
        }
    }

    /// Reports, once, that a rejection has a status of success.
    #[cold]
    pub(crate) fn rejected_with_success(&self, status: StatusCode) {
        if self.misconfiguration.denied_with_success.claim() {
            self.report(&format!(
                "a rejection has the status {}, which tells the client that its request was served: give it \
                 `rejection.status()`, as in `(rejection.status(), Json(..)).into_response()`, or add \
                 `.denied_with_success()` to the layer if that is intended{DENIED_WITH_SUCCESS}",
                status.as_u16()
            ));
        }
    }

    /// Reports, once, that a gRPC call was rejected over HTTP. Any client can send a gRPC request, so this is only suspected.
    #[cold]
    pub(crate) fn grpc_over_http(&self) {
        if self.misconfiguration.grpc_over_http.claim() {
            let problem = format!(
                "a gRPC call was rejected over HTTP, so its client sees a broken server: enable the feature `tonic` and add \
                 `.reject(GrpcReject::new().or(HttpReject::new()))` to the layer, or ignore this if the service has no \
                 gRPC{GRPC_OVER_HTTP}"
            );
            self.suspect(&problem);
        }
    }

    /// Reports, once, if none of the first requests costs anything. Call it if nothing charges a request later.
    #[inline]
    pub(super) fn costs(&self, cost: u32) {
        let costs = &self.misconfiguration.costs;
        if cost > 0 {
            return costs.found();
        }
        costs.missed(|| {
            format!(
                "none of the first {} requests cost anything, so the layer limits nothing: return at least 1 from `.cost(..)`, or, if \
                 they are charged later, add `.until_body_end()` or `.settle(..)`{NO_COST}",
                Misses::REPORT_AT
            )
        });
    }

    /// Reports, once, if all of the first requests with an id have the same one. Any client can repeat a request, so this is
    /// only suspected.
    #[inline]
    pub(crate) fn has_id(&self, id: &Key) {
        let same_ids = &self.misconfiguration.same_ids;
        if !same_ids.is_open() {
            return;
        }
        if self.misconfiguration.first_id.get_or_init(|| *id) != id {
            return same_ids.found();
        }
        same_ids.missed(|| {
            format!(
                "all of the first {} requests with an id have the same one, so only the first request of each caller is charged: use an id that differs for each request, such as its `Idempotency-Key`, and none for a request without one{CONSTANT_ID}",
                Misses::REPORT_AT
            )
        });
    }

    /// Reports, once, that a throttle was called without a permit.
    #[cold]
    pub(crate) fn call_without_ready(&self) {
        if self.misconfiguration.call_without_ready.claim() {
            self.report(&format!(
                "a throttle was called before it was ready, so the call did not wait for its turn: wait for `ready().await?` \
                 before each `call`, of the same clone, or use `oneshot`{CALL_WITHOUT_READY}"
            ));
        }
    }

    /// Reports, once, a proxy that the extractor does not trust: all of its clients share one count.
    #[cold]
    pub(crate) fn unknown_proxy(&self, problem: impl FnOnce() -> String) {
        if self.misconfiguration.unknown_proxy.claim() {
            self.report(&problem());
        }
    }

    /// Ends the count of [forwarded](Self::forwarded) requests: this one is of a client, or of a trusted proxy.
    pub(crate) fn not_forwarded(&self) {
        self.misconfiguration.forwarded.found();
    }

    /// Reports, once, if all of the first requests were forwarded, by peers with public addresses that the extractor does not
    /// trust. One client can forge their header, so this is only suspected.
    #[cold]
    pub(crate) fn forwarded(&self, problem: impl FnOnce() -> String) {
        self.misconfiguration.forwarded.missed(problem);
    }

    /// Reports, once, a header that does not fit the trusted proxies. A client may cause it, so it is only suspected.
    #[cold]
    pub(crate) fn proxy_header(&self, problem: impl FnOnce() -> String) {
        if self.misconfiguration.proxy_header.claim() {
            self.suspect(&problem());
        }
    }

    /// Reports, once, a request without an address.
    #[cold]
    pub(crate) fn no_address(&self, problem: impl FnOnce() -> String) {
        if self.misconfiguration.no_address.claim() {
            self.report(&problem());
        }
    }

    /// Returns `true` for the first requests of the layer, which are examined for mistakes. Requests that show nothing of a
    /// forwarded one's kind, such as health checks, prolong the count of [these](Self::forwarded).
    #[inline]
    pub(super) fn examines_requests(&self) -> bool {
        let Misconfiguration {
            examined,
            forwarded,
            ..
        } = &*self.misconfiguration;
        examined.load(Relaxed) < Misses::REPORT_AT || forwarded.is_counting()
    }

    /// Counts an examined request. Returns `true` for the first one.
    pub(super) fn examined(&self) -> bool {
        self.misconfiguration.examined.fetch_add(1, Relaxed) == 0
    }

    /// Reports callers whose key an extractor cannot make.
    #[cold]
    pub(super) fn impossible_caller(&self, caller: &str, forms: KeyForms) {
        self.report(&format!(
            "the policies of {caller} apply to nothing, since the extractor makes {forms} only: write the caller as the extractor \
             does, as by its `key_of`{CALLER_FORM}"
        ));
    }

    /// Reports, once, if none of the first requests had a route.
    #[cfg_attr(not(feature = "axum"), allow(dead_code, reason = "routes are axum's"))]
    pub(crate) fn has_route(&self, has_route: bool) {
        let routes = &self.misconfiguration.routes;
        if has_route {
            return routes.found();
        }
        routes.missed(|| {
            format!(
                "none of the first {} requests matched a route, and all of them shared one key: add the layer to the `Router`, to \
                 a nested one or to a route, instead of wrapping the `Router` in it{NO_ROUTE}",
                Misses::REPORT_AT
            )
        });
    }

    /// Reports, once, if another layer or limiter over the same store counts by these policies with another
    /// limit: each uses up the limit of the other.
    #[inline]
    pub(crate) fn shared_count(
        &self,
        store: impl FnOnce() -> Option<Waiters>,
        policies: &Policies,
    ) {
        if self.misconfiguration.layer.get().is_none()
            && let Some(store) = store()
        {
            self.list(&store, policies);
        }
    }

    #[cold]
    fn list(&self, store: &Waiters, policies: &Policies) {
        let listed = &self.misconfiguration.layer;
        let (layer, other) = store.list_layer(policies.clone());
        if listed.set(layer).is_ok()
            && let Some((policy, other)) = other
        {
            let quota = policy.quota();
            let problem = format!(
                "two layers or limiters have a policy {:?}, one with {other} and one with {quota}, and they share one count per \
                 caller: give each policy a name of its own, or both the same quota{ONE_NAME_TWO_QUOTAS}",
                policy.name()
            );
            self.suspect(&problem);
        }
    }

    /// Reports the first check under a leased policy if no block can decide it. Call it before a check is sent.
    #[inline]
    pub(crate) fn examine_lease(&self, store: &impl Store, check: &Check) {
        if check.policies().have_lease() && !self.misconfiguration.sent_leased.is_claimed() {
            self.examine_first_lease(store, check);
        }
    }

    /// Sends a check of several keys. Reports the first one under a leased policy: no block can decide it.
    pub(crate) fn send_all<S: Store>(&self, store: &S, joint: JointCheck) -> JointFuture {
        self.never_leased(joint.policies());
        store.check_all(joint)
    }

    /// Looks at the first check under a leased policy that costs something.
    #[cold]
    fn examine_first_lease(&self, store: &impl Store, check: &Check) {
        if check.cost() == 0 {
            return;
        }
        if is_leasable(check) && store.backend().leases() {
            self.misconfiguration.sent_leased.claim();
        } else {
            self.never_leased(check.policies());
        }
    }

    /// Reports that no block can decide checks under these policies, if one of them is leased and none was sent before.
    pub(crate) fn never_leased(&self, policies: &Policies) {
        if policies.have_lease() && self.misconfiguration.sent_leased.claim() {
            let name = policies
                .iter()
                .find(|policy| policy.lease().is_some())
                .map_or("", |policy| policy.name());
            self.report(&format!(
                "policy {name:?} is leased without effect, which only tightens its quota: wrap the store in `Leased`, \
                 around any `Fallback`, lease every policy of the list, and do not settle, reserve or wait; or remove the \
                 lease from the policy{NOT_LEASED}"
            ));
        }
    }

    fn report(&self, problem: &str) {
        or_log(self.observer.as_ref()).notify(&Event::Misconfigured { problem });
    }

    fn suspect(&self, problem: &str) {
        or_log(self.observer.as_ref()).notify(&Event::Suspected { problem });
    }
}

impl Misconfiguration {
    fn is_due(&self) -> bool {
        let now = instant();
        let mut last = lock(&self.reported);
        if let Some(last) = *last
            && now.saturating_duration_since(last) < PAUSE
        {
            return false;
        }
        *last = Some(now);
        true
    }
}

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}
