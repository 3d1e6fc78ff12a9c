//! An observer that counts the events of each second, and sends the record to each page.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::sync::watch;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::{Key, Policy};

use crate::redis::State;

/// Number of seconds that a new page can show.
const SECONDS: usize = 90;
/// Number of seconds after an outage in which its grants are charged.
const RECONCILIATION_SECONDS: u32 = 5;
/// Number of seconds for which an idle caller is shown.
const MAX_IDLE_SECONDS: u32 = 5;

/// The observer of all instances.
pub(crate) struct Recorder {
    second: Mutex<Second>,
    /// Numbered records, as JSON.
    records: watch::Sender<VecDeque<(u64, Arc<str>)>>,
}

#[derive(Default)]
struct Second {
    record: Record,
    /// The duration of each check, in microseconds.
    elapsed: Vec<u128>,
    callers: HashMap<Key, Caller>,
    /// Number of instances that decide locally.
    local: u32,
    /// Seconds since an instance decided locally. `None` if none has.
    since_local: Option<u32>,
}

struct Caller {
    policy: Policy,
    remaining: u32,
    denied: u32,
    idle_seconds: u32,
}

/// The settings of the page's buttons.
#[derive(Serialize)]
pub(crate) struct Settings {
    pub(crate) redis: State,
    pub(crate) rate: u32,
    /// By plan.
    pub(crate) quotas: BTreeMap<&'static str, String>,
}

/// The record of one second.
#[derive(Default, Serialize)]
struct Record {
    /// End of the second, in milliseconds since 1970.
    at: u128,
    #[serde(flatten)]
    settings: Option<Settings>,
    /// By source, as in the next field.
    allowed: BTreeMap<&'static str, u32>,
    denied: BTreeMap<&'static str, u32>,
    /// Requests without a decision.
    unanswered: u32,
    /// Checks that Redis could not decide, by kind of error.
    failed: BTreeMap<&'static str, u32>,
    /// In microseconds, as in the next field.
    p50: Option<u128>,
    p99: Option<u128>,
    /// Histogram of the number of checks in a call of Redis, in powers of two.
    batches: BTreeMap<usize, u32>,
    /// Total number of checks in these calls.
    checks: usize,
    local: u32,
    reconciled: u64,
    dropped: u64,
    policies: BTreeMap<String, Fill>,
    notes: Vec<Note>,
}

/// The remaining quota of a policy's callers.
#[derive(Serialize)]
struct Fill {
    /// During an outage, the capacity of an instance's share.
    capacity: u32,
    /// Name, remaining quota, and number of denials of each.
    callers: Vec<(String, u32, u32)>,
}

/// An action of a user, or its result.
#[derive(Serialize)]
struct Note {
    /// Its name on the time line; empty for an entry in the text only.
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

    /// Records an action of a user.
    pub(crate) fn note(&self, mark: impl Into<String>, text: impl Into<String>) {
        self.second().record.note(mark, text);
    }

    pub(crate) fn unanswered(&self) {
        self.second().record.unanswered += 1;
    }

    /// Ends a second.
    pub(crate) fn end_second(&self, settings: Settings) {
        let (record, mut elapsed) = self.second().end();
        // Sort after the lock was released, because it takes a while.
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

    /// The last records, then each new one when its second ends.
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
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Decided {
                decision,
                elapsed,
                key,
                ..
            } => {
                let mut second = self.second();
                let counts = if decision.is_allowed() {
                    &mut second.record.allowed
                } else {
                    &mut second.record.denied
                };
                *counts.entry(decision.source().as_str()).or_default() += 1;
                second.elapsed.push(elapsed.as_micros());
                let denied = second.callers.get(key).map_or(0, |caller| caller.denied);
                let caller = Caller {
                    policy: decision.policy().clone(),
                    remaining: decision.remaining(),
                    denied: denied + u32::from(!decision.is_allowed()),
                    idle_seconds: 0,
                };
                second.callers.insert(*key, caller);
            }
            Event::Failed { error, .. } => {
                *self
                    .second()
                    .record
                    .failed
                    .entry(error.kind().as_str())
                    .or_default() += 1;
            }
            Event::Degraded { error, .. } => {
                let mut second = self.second();
                second.local += 1;
                if second.local == 1 {
                    let kind = error.kind().as_str();
                    second.record.note(
                        "",
                        format!("Too many checks failed ({kind}): the fallback decides"),
                    );
                }
            }
            Event::Recovered { after, .. } => {
                let mut second = self.second();
                second.local = second.local.saturating_sub(1);
                if second.local == 0 {
                    let recovered = format!("Redis decides again, after {after:.1?}");
                    second.record.note("", recovered);
                }
            }
            Event::Reconciled {
                charged, dropped, ..
            } => {
                let record = &mut self.second().record;
                record.reconciled += charged;
                record.dropped += dropped;
            }
            Event::Sent { checks, .. } => {
                let record = &mut self.second().record;
                *record
                    .batches
                    .entry(1 << checks.max(1).ilog2())
                    .or_default() += 1;
                record.checks += checks;
            }
            _ => {}
        }
    }
}

impl Second {
    /// Returns the record of the second, and starts the next one.
    fn end(&mut self) -> (Record, Vec<u128>) {
        let mut record = mem::take(&mut self.record);
        record.local = self.local;
        self.since_local = match self.local {
            0 => self.since_local.map(|seconds| seconds.saturating_add(1)),
            _ => Some(0),
        };
        let (charged, dropped) = (record.reconciled, record.dropped);
        if charged + dropped > 0 {
            let is_after_outage = self
                .since_local
                .is_some_and(|seconds| seconds <= RECONCILIATION_SECONDS);
            let (mark, text) = if is_after_outage {
                let mark = format!("{charged} charged");
                (
                    mark,
                    format!("Reconciled: {charged} charged to Redis, {dropped} dropped"),
                )
            } else {
                // No outage on the time line explains a mark.
                let text = format!(
                    "Redis was too slow for some checks: {charged} that the fallback granted are charged to it, {dropped} dropped"
                );
                (String::new(), text)
            };
            record.note(mark, text);
        }
        self.callers
            .retain(|_, caller| caller.idle_seconds < MAX_IDLE_SECONDS);
        for (key, caller) in &mut self.callers {
            caller.idle_seconds += 1;
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
