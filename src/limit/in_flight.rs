//! Requests in flight: how many of a caller run at the same moment; the twin of `lua/in_flight.lua`.
//!
//! **Idea.** A request that passes holds one until it is released, whatever it costs; one more is allowed while less
//! than `L` are held. Each instance has a number, and the state has an entry for each instance that holds some: how
//! many, and when it last reported that. An entry that was not renewed for the lease time `P` does not count. So what a
//! dead instance held is free again after `P`, and the size of a state depends on the number of instances, not of
//! requests.
//!
//! **Cost.** One key, read and written whole: 22 bytes for each instance that holds some.
//!
//! **When not.** It does not limit how often: a fast request is free again at once.
//!
//! **Source.** Semaphores by leases, such as Redisson's `RPermitExpirableSemaphore`, which has an entry for each permit.
//!
//! **Two quotas under one name.** Each entry has the lease time of its writer. What is held counts under both, and each
//! compares it with its own limit.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::strategy::{Ask, Params, Preview, Registers};
use super::{Mode, Quota, Verdict};
use crate::error::ConfigError;

/// A request may end at any time: waiters try again after so many microseconds.
const AGAIN: i64 = 100_000;

/// How many requests may be in flight.
const MAX: u32 = 1_000_000;
/// A lease is renewed three times in its time, and a dead instance's is free again after it.
const LEASE_TIMES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3_600);

/// Checks that a quota can be a number of requests and a lease time.
pub(super) fn check(quota: Quota) -> Result<(), ConfigError> {
    let wrong = |problem| {
        Err(ConfigError::new(format!(
            "the quota `{quota}` cannot count requests in flight: {problem}; write how many at once and the lease time, like \
             `10/30s`"
        )))
    };
    match quota {
        _ if quota.capacity() != quota.limit() => wrong("they have no burst"),
        _ if quota.limit() > MAX => wrong("more than 1000000 at once"),
        _ if !LEASE_TIMES.contains(&quota.period()) => wrong("the lease time is not from 1 second to 1 hour"),
        _ => Ok(()),
    }
}

/// Boxed, so that the states of strategies stay small.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State(Box<Holders>);

/// Asked by one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holders {
    own: Holder,
    /// A local store serves one instance, so only tests have others.
    others: Vec<Holder>,
}

/// An instance that holds some.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Holder {
    instance: u64,
    count: i64,
    /// When it last reported.
    told: i64,
    /// For how long that counts.
    lease: i64,
}

impl Holder {
    /// The same at `now`: none whose lease has ended.
    fn at(self, now: i64) -> Option<Self> {
        let told = self.told.min(now);
        (told + self.lease > now).then_some(Self { told, ..self })
    }
}

impl State {
    /// What this instance holds, what the others do, and when the last of theirs ends. And whether it must be saved even
    /// if nothing changes, since the clock has gone back.
    fn load(&self, now: i64) -> (Registers, bool) {
        let own = self.0.own.at(now).map_or(0, |own| own.count);
        let (mut others, mut latest) = (0, 0);
        for other in self.0.others.iter().filter_map(|other| other.at(now)) {
            (others, latest) = (others + other.count, latest.max(other.told + other.lease));
        }
        let future = self.0.own.told > now || self.0.others.iter().any(|other| other.told > now);
        ([own, others, latest], future)
    }

    /// What its policy sees. Only a charge bounds what the other policies grant: a request is not part of their cost.
    pub(super) fn preview(&self, params: &Params, ask: &Ask) -> Preview {
        let &Ask { mode, cost, now, .. } = ask;
        let (registers, dirty) = self.load(now);
        let ([own, others, _], capacity) = (registers, params.capacity);
        let room = capacity - own - others;
        let (needs, grants) = match mode {
            Mode::Peek => (1, 0),
            Mode::Take | Mode::TakeAhead | Mode::UpTo => (1, 1),
            Mode::Charge => (mode.needs(cost, capacity), mode.grants(cost, room, capacity)),
            // However long ago it was taken.
            Mode::Refund => (i64::MIN, cost.min(own)),
            Mode::Reset => (i64::MIN, capacity - room),
            Mode::Renew if own > 0 => (i64::MIN, own),
            Mode::Renew | Mode::Hold => (i64::MIN, cost),
        };
        let (grants, max) = match mode {
            _ if room < needs => (0, -1),
            Mode::Charge => (grants, grants),
            _ => (grants, i64::MAX),
        };
        Preview { registers, dirty, room, needs, grants, max }
    }

    /// Decides, and holds what is granted: the verdict, and how much that is; of a renewal, how many are held. A `max` below
    /// 0 is of a check that another policy denies.
    pub(super) fn decide(&mut self, params: &Params, ask: &Ask, max: i64) -> (Verdict, i64) {
        let (mode, now) = (ask.mode, ask.now);
        let Preview { registers: [own, others, latest], dirty, room, needs, grants, .. } = self.preview(params, ask);
        let wait = if room < needs { AGAIN } else { 0 };
        let (held, granted) = match mode {
            Mode::Reset => {
                *self = Self::default();
                return (Verdict { remaining: params.capacity, wait, reset: 0 }, grants);
            }
            Mode::Refund => (own - grants, grants),
            Mode::Renew | Mode::Hold => (grants, grants),
            _ if max < 0 => (own, 0),
            Mode::Charge => (own + grants.min(max), grants.min(max)),
            _ => (own + grants, grants),
        };
        let reset = (latest - now).max(if held > 0 { params.period } else { 0 }).max(0);
        if granted > 0 || matches!(mode, Mode::Renew | Mode::Hold) || dirty && mode != Mode::Peek {
            self.save(params, now, held);
        }
        (Verdict { remaining: (params.capacity - held - others).max(0), wait, reset }, granted)
    }

    fn save(&mut self, params: &Params, now: i64, held: i64) {
        let Holders { own, others } = &mut *self.0;
        *own = match held {
            0 => Holder { instance: own.instance, ..Holder::default() },
            count => Holder { count, told: now, lease: params.period, ..*own },
        };
        *others = others.iter().filter_map(|other| other.at(now)).collect();
    }
}

#[cfg(test)]
impl State {
    /// From here on another instance asks.
    pub(crate) fn ask_as(&mut self, instance: u64) {
        if instance == self.0.own.instance {
            return;
        }
        let found = self.0.others.iter().position(|other| other.instance == instance);
        let next = found.map_or(Holder { instance, ..Holder::default() }, |i| self.0.others.swap_remove(i));
        let former = std::mem::replace(&mut self.0.own, next);
        self.0.others.extend((former.count > 0).then_some(former));
    }
}
