//! The state of a run: what the primary store counts, what was asked, and what became of it.

use std::sync::{Arc, Mutex, MutexGuard};

use fastrand::Rng;
use futures_util::FutureExt;
use tokio::time::Instant;

use super::doubt::Doubt;
use super::ledger::{Granted, Heard, Ledger, Ran, Rule, Settled};
use super::log::Log;
use super::plan::{Caller, Kind, Plan, pick};
use super::primary::{Fate, Reply};
use crate::limit::{Check, Decision, Key, Mode, Outcome, Source, Verdicts};
use crate::store::instant;
use crate::store::{Error, ErrorKind, LocalStore, Observer, Store, event, lock};

#[derive(Debug, Clone)]
pub(super) struct World(Arc<Mutex<State>>);

#[derive(Debug)]
pub(super) struct State {
    pub(super) plan: Plan,
    pub(super) ledger: Ledger,
    pub(super) log: Log,
    rng: Rng,
    start: Instant,
    /// How many broken rules are in the log.
    told: usize,
    /// Which instances say so.
    degraded: Vec<bool>,
    /// Until when each has last asked something that none of its clients had asked.
    turned: Vec<u64>,
    doubts: Vec<Doubt>,
    /// What becomes of the requests of each in a millisecond, if they are one call.
    calls: Vec<Option<(u64, Fate)>>,
    /// What the primary store counts.
    counts: LocalStore,
    /// The request of a client that runs now. Whatever else runs is of the instance's own.
    current: Option<usize>,
    asks: Vec<Ask>,
    requests: Vec<Request>,
}

/// What a client asked.
#[derive(Debug)]
struct Ask {
    instance: usize,
    caller: usize,
    check: Check,
    since: u64,
    /// Whether the primary store was asked, and whether it said that nothing was sent.
    asked: bool,
    unsent: bool,
    ran: Ran,
}

/// What the primary store was asked.
#[derive(Debug)]
struct Request {
    instance: usize,
    /// None if it was a probe.
    caller: Option<usize>,
    /// None if it was no client that asked.
    ask: Option<usize>,
    settled: Option<Settled>,
    sent: bool,
    ran: bool,
}

impl World {
    pub(super) fn new(plan: Plan, rng: Rng, kept: bool, counts: LocalStore) -> Self {
        let state = State {
            ledger: Ledger::new(&plan),
            log: Log { kept, ..Log::default() },
            rng,
            start: instant(),
            told: 0,
            degraded: vec![false; plan.instances],
            turned: vec![0; plan.instances],
            doubts: (0..plan.instances).map(|_| Doubt::default()).collect(),
            calls: vec![None; plan.instances],
            counts,
            current: None,
            asks: vec![],
            requests: vec![],
            plan,
        };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Does something for a client's request.
    pub(super) fn during<T>(&self, ask: usize, work: impl FnOnce() -> T) -> T {
        self.state().current = Some(ask);
        let done = work();
        self.state().current = None;
        done
    }
}

impl State {
    /// In milliseconds since the start.
    pub(super) fn now(&self) -> u64 {
        (instant() - self.start).as_millis() as u64
    }

    fn say(&mut self, caller: Option<usize>, text: impl FnOnce() -> String) {
        let now = self.now();
        // What has just been broken stands where it was.
        for broken in &self.ledger.broken[self.told..] {
            self.log.say(now, broken.caller, || format!("*** {broken}"));
        }
        self.told = self.ledger.broken.len();
        self.log.say(now, caller, text);
    }

    pub(super) fn note(&mut self, text: String) {
        self.say(None, || text);
    }

    fn breaks(&mut self, rule: Rule, caller: Option<usize>, problem: String) {
        self.ledger.breaks(rule, caller, problem);
    }

    /// A client asks.
    pub(super) fn asks(&mut self, instance: usize, caller: usize, check: &Check) -> usize {
        let (ask, check) = (self.asks.len(), check.clone());
        self.say(Some(caller), || format!("i{instance} #{ask:<4} {}", shown(&check)));
        let since = self.now();
        self.asks.push(Ask { instance, caller, check, since, asked: false, unsent: false, ran: Ran::default() });
        ask
    }

    /// A client's request is answered.
    pub(super) fn told(&mut self, ask: usize, polled: u64, degraded: bool, answer: &Result<Decision, Error>) {
        let now = self.now();
        let Ask { instance, caller, ref check, since, ran, .. } = self.asks[ask];
        let check = check.clone();
        self.say(Some(caller), || format!("i{instance} #{ask:<4} answered: {}", answered(answer)));
        let latest = (since + self.plan.deadline).max(polled);
        if now > latest {
            let deadline = self.plan.deadline;
            let problem = format!("#{ask} was answered after {} ms, with a deadline of {deadline} ms", now - since);
            self.breaks(Rule::Wait, Some(caller), problem);
        }
        let decision = match answer {
            Ok(decision) => decision,
            Err(error) => return self.breaks(Rule::Failed, Some(caller), format!("#{ask} failed: {error}")),
        };
        if decision.source() == Source::Redis && !degraded {
            self.doubts[instance].answers(since, ask);
        }
        // An id is answered as it was before, when the part may have been another.
        let other = check.id().is_some() && self.ledger.changed;
        if let Some(problem) = nonsense(&self.plan.callers[caller], &check, decision).filter(|_| !other) {
            self.breaks(Rule::Sense, Some(caller), format!("#{ask}: {problem}"));
        }
        if decision.source() == Source::Redis && !degraded && check.id().is_none() {
            let turned = self.turned[instance];
            self.ledger.hears(&self.plan, &Heard { caller, instance, ran, since, turned }, decision);
        }
        if matches!(check.mode(), Mode::Take | Mode::UpTo) && decision.granted() > 0 {
            let id = check.id().map(Key::as_bytes);
            self.ledger.grants(&self.plan, now, caller, i64::from(decision.granted()), id);
        }
    }

    /// A client goes away.
    pub(super) fn dropped(&mut self, ask: usize) {
        let Ask { instance, caller, .. } = self.asks[ask];
        self.say(Some(caller), || format!("i{instance} #{ask:<4} dropped"));
    }

    /// The local store of an instance decides.
    pub(super) fn decides_locally(&mut self, instance: usize, check: &Check, decision: &Decision) {
        let Some(ask) = self.current else {
            let caller = self.caller(check);
            return self.say(caller, || format!("i{instance}       looks: {}", shown(check)));
        };
        let Ask { caller, asked, unsent, .. } = self.asks[ask];
        self.say(Some(caller), || format!("i{instance} #{ask:<4} decides: {}", verdict(decision)));
        let now = self.now();
        let (mode, cost, id) = (check.mode(), i64::from(check.cost()), check.id().map(Key::as_bytes));
        let granted = Granted {
            caller,
            instance,
            mode,
            cost,
            id,
            unasked: !asked || unsent,
            degraded: self.degraded[instance],
            settling: now <= self.turned[instance],
        };
        self.ledger.decides(&self.plan, now, &granted, i64::from(decision.granted()));
    }

    fn caller(&self, check: &Check) -> Option<usize> {
        self.plan.callers.iter().position(|caller| caller.key == *check.key())
    }

    /// A request comes to the primary store, or should. What becomes of it.
    pub(super) fn arrives(&mut self, instance: usize, check: &Check) -> (usize, Fate) {
        let (request, caller, ask) = (self.requests.len(), self.caller(check), self.current);
        let settled = caller.filter(|_| ask.is_none()).map(|caller| Settled {
            caller,
            instance,
            mode: check.mode(),
            cost: i64::from(check.cost()),
            with_id: check.id().is_some(),
        });
        if let Some(ask) = ask {
            (self.asks[ask].asked, self.asks[ask].unsent) = (true, false);
        }
        let now = self.now();
        let fate = match &self.calls[instance] {
            Some((at, fate)) if *at == now && self.plan.batched && ask.is_some() => fate.clone(),
            _ => self.fate(instance, now),
        };
        if let Some(ask) = ask {
            self.calls[instance] = Some((now, fate.clone()));
            self.doubts[instance].sends(now, ask);
        } else if caller.is_none() {
            self.doubts[instance].probes(now, self.plan.deadline);
        }
        if ask.is_none() {
            // Until it is answered, or given up.
            self.turned[instance] = now + self.plan.deadline;
            let what = if caller.is_some() { "settles" } else { "probes" };
            self.say(caller, || format!("i{instance}       {what}: {}", shown(check)));
        }
        if let Some(settled) = &settled {
            self.ledger.settles(&self.plan, now, settled);
        }
        self.requests.push(Request { instance, caller, ask, settled, sent: false, ran: false });
        (request, fate)
    }

    fn fate(&mut self, instance: usize, now: u64) -> Fate {
        let deadline = self.plan.deadline;
        let rng = &mut self.rng;
        let mut faults = self.plan.faults.iter();
        let fault =
            faults.find(|fault| (fault.from..fault.until).contains(&now) && fault.instances >> instance & 1 == 1);
        let well =
            Fate { queued: rng.u64(..2), sent: rng.u64(..3), runs: true, back: rng.u64(..3), answer: Reply::Decision };
        let Some(fault) = fault else { return well };
        const SOME: [Kind; 8] = [
            Kind::Down,
            Kind::Refusing,
            Kind::RefusingSome,
            Kind::QueueFull,
            Kind::LosingRequests,
            Kind::LosingReplies,
            Kind::Cutting,
            Kind::Late,
        ];
        let kind = match fault.kind {
            Kind::Mixed if rng.bool() => return well,
            Kind::Mixed => *pick(rng, &SOME),
            kind => kind,
        };
        let error = |kind| Reply::Error(Error::new(kind));
        let at_once = |answer| Fate { queued: 0, sent: 0, runs: false, back: 0, answer };
        match kind {
            Kind::Down | Kind::Emptied => Fate {
                queued: if rng.bool() { 0 } else { rng.u64(..5) },
                ..at_once(Reply::Error(Error::new(ErrorKind::Unreachable).unsent()))
            },
            Kind::Refusing => Fate { runs: false, answer: error(ErrorKind::Refused), ..well },
            Kind::RefusingSome | Kind::QueueFull | Kind::LosingRequests | Kind::LosingReplies | Kind::Cutting
                if rng.u8(..3) == 0 =>
            {
                well
            }
            Kind::RefusingSome => {
                Fate { runs: false, answer: Reply::Error(Error::new(ErrorKind::Refused).of_check()), ..well }
            }
            Kind::QueueFull => at_once(Reply::Error(Error::new(ErrorKind::QueueFull).unsent())),
            Kind::LosingRequests => Fate { runs: false, answer: Reply::Never, ..well },
            Kind::LosingReplies => Fate { answer: Reply::Never, ..well },
            Kind::Cutting => Fate { answer: error(ErrorKind::Unreachable), ..well },
            Kind::Late => {
                let sent = rng.u64(..deadline);
                Fate { sent, back: rng.u64(deadline / 2..deadline * 5 / 4) - sent / 2, ..well }
            }
            Kind::Slow => Fate { queued: rng.u64(..deadline * 2), sent: rng.u64(deadline..deadline * 5), ..well },
            Kind::Frozen => Fate { sent: fault.until - now + rng.u64(..5), ..well },
            Kind::Mixed => well,
        }
    }

    /// A request leaves the queue.
    pub(super) fn sends(&mut self, request: usize) {
        self.requests[request].sent = true;
    }

    /// An instance takes a request back, if it is still in the queue.
    pub(super) fn withdraws(&mut self, request: usize) -> bool {
        let Request { instance, caller, ask, sent, .. } = self.requests[request];
        if sent {
            return false;
        }
        if let Some(ask) = ask {
            self.asks[ask].unsent = true;
        }
        let now = self.now();
        if let Some(settled) = self.requests[request].settled.take() {
            self.ledger.failed(now, &settled, true);
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        self.say(caller, || format!("i{instance} {whose:<5} is taken back, not sent"));
        true
    }

    /// A request runs.
    pub(super) fn runs(&mut self, request: usize, check: Check) -> Decision {
        let Request { instance, caller, ask, settled, .. } = self.requests[request];
        self.requests[request].ran = true;
        // The local store answers at once.
        let decision = self.counts.check(check.clone()).now_or_never().unwrap().unwrap();
        let each = decision.verdicts().map(|(_, verdict)| *verdict).collect();
        let verdicts = Verdicts { granted: i64::from(decision.granted()), each };
        let (mode, granted, id) = (check.mode(), verdicts.granted, check.id().copied());
        let id = id.as_ref().map(Key::as_bytes);
        let decision = check.answer(verdicts, Source::Redis);
        if let (Some(caller), Some(ask)) = (caller, ask) {
            self.asks[ask].ran = self.ledger.ran(caller, mode, granted, id);
        }
        if let Some(settled) = settled {
            self.ledger.settled(&settled, granted);
        }
        if caller.is_some() {
            let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
            self.say(caller, || format!("i{instance} {whose:<5} runs in Redis: {}", verdict(&decision)));
        }
        decision
    }

    /// A request is answered, if anybody still waits.
    pub(super) fn answers(&mut self, request: usize, error: Option<&Error>) {
        let Request { instance, caller, ask, settled, ran, .. } = self.requests[request];
        let Some(error) = error else {
            if caller.is_none() {
                let now = self.now();
                self.doubts[instance].is_probed(now);
            }
            return;
        };
        if let Some(ask) = ask {
            self.asks[ask].unsent = error.is_unsent();
        }
        let now = self.now();
        if let (Some(settled), false) = (settled, ran) {
            self.ledger.failed(now, &settled, error.is_unsent());
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        let known = if error.is_unsent() { ", not sent" } else { "" };
        self.say(caller, || format!("i{instance} {whose:<5} fails in Redis: {}{known}", error.kind().as_str()));
    }

    /// A request was not answered.
    pub(super) fn lost(&mut self, request: usize) {
        let Request { instance, caller, ask, settled, ran, .. } = self.requests[request];
        let now = self.now();
        if let (Some(settled), false) = (settled, ran) {
            self.ledger.failed(now, &settled, false);
        }
        let what = if ran { "the answer is lost" } else { "the request is lost" };
        self.say(caller, || format!("i{instance} {:<5} {what}", ask.map_or(String::new(), |ask| format!("#{ask}"))));
    }

    /// Whoever asked went away before the request was sent.
    pub(super) fn withdrawn(&mut self, request: usize) {
        let Request { instance, caller, ask, settled, .. } = self.requests[request];
        let now = self.now();
        if let Some(settled) = settled {
            self.ledger.failed(now, &settled, false);
        }
        let whose = ask.map_or(String::new(), |ask| format!("#{ask}"));
        self.say(caller, || format!("i{instance} {whose:<5} never sent: nobody waits"));
    }

    /// An instance notes that the primary store failed a request.
    fn fails(&mut self, instance: usize, error: &Error) {
        let Some(ask) = self.current.filter(|_| !self.degraded[instance]) else { return };
        let counts = !error.is_of_check() && error.kind() != ErrorKind::QueueFull;
        let now = self.now();
        let failures = self.doubts[instance].fails(now, ask, counts);
        if failures > self.plan.failures {
            let problem = format!("i{instance} has sent one request after another, of which {failures} failed");
            self.breaks(Rule::Silence, None, problem);
        }
    }

    /// The primary store forgets everything.
    pub(super) fn empties(&mut self) {
        self.counts = LocalStore::default();
        self.ledger.emptied += 1;
        self.say(None, || "Redis forgets everything".to_owned());
    }

    /// Nobody asks any more, and all is well: has everything been told?
    pub(super) fn rests(&mut self) {
        self.say(None, || "all is quiet".to_owned());
        for (index, caller) in self.plan.callers.iter().enumerate() {
            let peek = Check::peek(caller.key, &caller.policies, 0);
            let decision = self.counts.check(peek).now_or_never().unwrap().unwrap();
            let used = decision.each().map(|each| i64::from(each.capacity() - each.remaining())).max().unwrap();
            self.ledger.rests(&self.plan, index, used);
        }
    }

    pub(super) fn break_rule(&mut self, rule: Rule, problem: String) {
        self.breaks(rule, None, problem);
    }
}

/// What is wrong with a decision, if anything is.
fn nonsense(caller: &Caller, check: &Check, decision: &Decision) -> Option<String> {
    let (granted, cost) = (decision.granted(), check.cost());
    for each in decision.each() {
        if each.remaining() > each.capacity() {
            return Some(format!("{} left of {}", each.remaining(), each.capacity()));
        }
    }
    let whole = caller.capacities().min().unwrap_or(0);
    match decision.outcome() {
        Outcome::Denied { retry_after } if retry_after.is_zero() => Some("denied, and need not wait".to_owned()),
        Outcome::NeverFits if i64::from(cost) <= whole => Some(format!("{cost} is said never to fit into {whole}")),
        Outcome::Denied { .. } | Outcome::NeverFits if granted > 0 => Some(format!("denied, and granted {granted}")),
        Outcome::Allowed if check.mode() == Mode::Take && granted != cost => {
            Some(format!("allowed {cost}, and granted {granted}"))
        }
        _ if check.mode() != Mode::Reset && granted > cost => Some(format!("granted {granted} of {cost}")),
        _ => None,
    }
}

fn shown(check: &Check) -> String {
    let (cost, key) = (check.cost(), String::from_utf8_lossy(check.key().as_bytes()));
    let id = check.id().map(|id| format!(" with id {}", String::from_utf8_lossy(id.as_bytes())));
    let id = id.unwrap_or_default();
    match check.mode() {
        Mode::Take => format!("take {cost} of {key}{id}"),
        Mode::TakeAhead => format!("take {cost} of {key} ahead"),
        Mode::UpTo => format!("take up to {cost} of {key}{id}"),
        Mode::Peek => format!("peek {cost} of {key}{id}"),
        Mode::Charge => format!("charge {cost} to {key}{id}"),
        Mode::GiveBack => format!("give {cost} back to {key}{id}"),
        Mode::Reset => format!("reset {key}{id}"),
    }
}

fn verdict(decision: &Decision) -> String {
    let left = format!("{} left of {}", decision.remaining(), decision.capacity());
    match decision.outcome() {
        Outcome::Allowed => format!("{} granted, {left}", decision.granted()),
        Outcome::Later { due_in } => format!("{} granted, due in {due_in:?}, {left}", decision.granted()),
        Outcome::Denied { retry_after } => format!("denied for {retry_after:?}, {left}"),
        Outcome::NeverFits => format!("never fits, {left}"),
    }
}

fn answered(answer: &Result<Decision, Error>) -> String {
    match answer {
        Ok(decision) => format!("{} ({:?})", verdict(decision), decision.source()),
        Err(error) => format!("error: {error}"),
    }
}

/// Tells the log what an instance tells its observer.
pub(super) struct Notes {
    pub(super) world: World,
    pub(super) instance: usize,
}

impl Observer for Notes {
    fn failed(&self, event: &event::Failed<'_>) {
        self.world.state().fails(self.instance, event.error);
    }

    fn degraded(&self, event: &event::Degraded<'_>) {
        let (instance, kind) = (self.instance, event.error.kind());
        let mut state = self.world.state();
        let now = state.now();
        state.degraded[instance] = true;
        state.turned[instance] = now.max(state.turned[instance]);
        state.ledger.opened += 1;
        state.doubts[instance] = Doubt::default();
        state.say(None, || format!("i{instance}       is degraded: {}", kind.as_str()));
    }

    fn recovered(&self, &event::Recovered { after }: &event::Recovered) {
        let instance = self.instance;
        let mut state = self.world.state();
        state.degraded[instance] = false;
        state.doubts[instance] = Doubt::default();
        state.say(None, || format!("i{instance}       has recovered after {after:?}"));
    }

    fn settled(&self, &event::Settled { charged, dropped }: &event::Settled) {
        let instance = self.instance;
        self.world.state().say(None, || format!("i{instance}       has settled {charged}, and dropped {dropped}"));
    }
}
