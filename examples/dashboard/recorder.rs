//! What happens, second by second: an observer counts it, and each page gets the record.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::watch;
use tower_redis_ratelimit::observe::{Observer, event};
use tower_redis_ratelimit::{Key, Policy};

use crate::redis::State;

/// For how many seconds a new page can look back.
const SECONDS: usize = 90;
/// For how many a caller is shown that sends nothing.
const QUIET: u32 = 5;

/// The observer of all instances.
pub(crate) struct Recorder {
    second: Mutex<Second>,
    /// By their numbers, as JSON.
    records: watch::Sender<VecDeque<(u64, Arc<str>)>>,
}

#[derive(Default)]
struct Second {
    record: Record,
    /// How long each check took, in microseconds.
    elapsed: Vec<u128>,
    callers: HashMap<Key, Caller>,
    /// How many instances decide by themselves.
    local: u32,
}

struct Caller {
    policy: Policy,
    remaining: u32,
    denied: u32,
    quiet: u32,
}

/// What people set by the page's buttons.
#[derive(Serialize)]
pub(crate) struct Settings {
    pub(crate) redis: State,
    pub(crate) rate: u32,
    /// By plan.
    pub(crate) quotas: BTreeMap<&'static str, String>,
}

/// What a page gets for a second.
#[derive(Default, Serialize)]
struct Record {
    /// When it ended, in milliseconds since 1970.
    at: u128,
    #[serde(flatten)]
    settings: Option<Settings>,
    /// By source, as the next one.
    allowed: BTreeMap<&'static str, u32>,
    denied: BTreeMap<&'static str, u32>,
    /// Requests that got no decision.
    unanswered: u32,
    /// Checks that Redis could not decide, by kind of the error.
    failed: BTreeMap<&'static str, u32>,
    /// In microseconds, as the next one.
    p50: Option<u128>,
    p99: Option<u128>,
    /// How many calls of Redis had so many checks, or up to twice as many.
    batches: BTreeMap<usize, u32>,
    /// How many checks these calls had together.
    checks: usize,
    local: u32,
    reconciled: u64,
    dropped: u64,
    policies: BTreeMap<String, Fill>,
    notes: Vec<Note>,
}

/// How much of a policy its callers have left.
#[derive(Serialize)]
struct Fill {
    /// In an outage, that of an instance's share.
    capacity: u32,
    /// Name, remaining, and how often denied.
    callers: Vec<(String, u32, u32)>,
}

/// What somebody did, or what came of it.
#[derive(Serialize)]
struct Note {
    /// Its name on the time line. Without one it is told by the text alone.
    mark: String,
    text: String,
}

impl Recorder {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            second: Mutex::default(),
            records: watch::Sender::new(VecDeque::new()),
        })
    }

    /// What somebody has done.
    pub(crate) fn note(&self, mark: impl Into<String>, text: impl Into<String>) {
        self.second().record.note(mark, text);
    }

    pub(crate) fn unanswered(&self) {
        self.second().record.unanswered += 1;
    }

    /// Ends a second.
    pub(crate) fn end(&self, settings: Settings) {
        let (record, mut elapsed) = self.second().end();
        // Behind the lock, since it takes its time.
        elapsed.sort_unstable();
        let percentile = |percent| elapsed.get(elapsed.len() * percent / 100).copied();
        let (p50, p99) = (percentile(50), percentile(99));
        let record = Record {
            at: now(),
            settings: Some(settings),
            p50,
            p99,
            ..record
        };
        let json = serde_json::to_string(&record).unwrap_or_default();
        self.records.send_modify(|records| {
            let number = records.back().map_or(1, |(last, _)| last + 1);
            records.push_back((number, json.into()));
            if records.len() > SECONDS {
                records.pop_front();
            }
        });
    }

    /// The last records, and each later one when its second ends.
    pub(crate) fn records(&self) -> impl Stream<Item = Arc<str>> + use<> {
        stream::unfold(
            (self.records.subscribe(), 0),
            async |(mut records, seen)| {
                loop {
                    let next = records
                        .borrow_and_update()
                        .iter()
                        .find(|(number, _)| *number > seen)
                        .cloned();
                    if let Some((number, record)) = next {
                        return Some((record, (records, number)));
                    }
                    records.changed().await.ok()?;
                }
            },
        )
    }

    fn second(&self) -> MutexGuard<'_, Second> {
        self.second.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Recorder {
    fn decided(&self, event: &event::Decided<'_>) {
        let (decision, mut second) = (event.decision, self.second());
        let counts = if decision.is_allowed() {
            &mut second.record.allowed
        } else {
            &mut second.record.denied
        };
        *counts.entry(decision.source().as_str()).or_default() += 1;
        second.elapsed.push(event.elapsed.as_micros());
        let denied = second
            .callers
            .get(event.key)
            .map_or(0, |caller| caller.denied);
        let caller = Caller {
            policy: decision.policy().clone(),
            remaining: decision.remaining(),
            denied: denied + u32::from(!decision.is_allowed()),
            quiet: 0,
        };
        second.callers.insert(*event.key, caller);
    }

    fn failed(&self, event: &event::Failed<'_>) {
        *self
            .second()
            .record
            .failed
            .entry(event.error.kind().as_str())
            .or_default() += 1;
    }

    fn degraded(&self, event: &event::Degraded<'_>) {
        let mut second = self.second();
        second.local += 1;
        if second.local == 1 {
            let why = event.error.kind().as_str();
            second.record.note(
                "",
                format!("Too many checks failed ({why}): the fallback decides"),
            );
        }
    }

    fn recovered(&self, event: &event::Recovered) {
        let mut second = self.second();
        second.local = second.local.saturating_sub(1);
        if second.local == 0 {
            let after = format!("Redis decides again, after {:.1?}", event.after);
            second.record.note("", after);
        }
    }

    fn reconciled(&self, event: &event::Reconciled) {
        let record = &mut self.second().record;
        record.reconciled += event.charged;
        record.dropped += event.dropped;
    }

    fn sends(&self, event: &event::Sends) {
        let record = &mut self.second().record;
        *record
            .batches
            .entry(1 << event.checks.max(1).ilog2())
            .or_default() += 1;
        record.checks += event.checks;
    }
}

impl Second {
    /// What is recorded of it, and begins the next one.
    fn end(&mut self) -> (Record, Vec<u128>) {
        let mut record = mem::take(&mut self.record);
        record.local = self.local;
        if record.reconciled + record.dropped > 0 {
            let text = format!(
                "Reconciled: {} charged to Redis, {} dropped",
                record.reconciled, record.dropped
            );
            record.note(format!("{} charged", record.reconciled), text);
        }
        self.callers.retain(|_, caller| caller.quiet < QUIET);
        for (key, caller) in &mut self.callers {
            caller.quiet += 1;
            let policy = &caller.policy;
            let fill = record
                .policies
                .entry(policy.name().to_owned())
                .or_insert_with(|| Fill::of(policy));
            fill.callers.push((
                key.reveal().to_owned(),
                caller.remaining,
                mem::take(&mut caller.denied),
            ));
        }
        record
            .policies
            .values_mut()
            .for_each(|fill| fill.callers.sort_unstable());
        (record, mem::take(&mut self.elapsed))
    }
}

impl Record {
    fn note(&mut self, mark: impl Into<String>, text: impl Into<String>) {
        self.notes.push(Note {
            mark: mark.into(),
            text: text.into(),
        });
    }
}

impl Fill {
    fn of(policy: &Policy) -> Self {
        Self {
            capacity: policy.quota().capacity(),
            callers: vec![],
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "people read the time of day")]
fn now() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis()
}
