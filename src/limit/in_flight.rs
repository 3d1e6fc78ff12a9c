//! Requests in flight: how many of a caller run at the same moment; the Rust half of `lua/in_flight.lua`.
//!
//! **Idea.** A request that passes takes a slot until the slot is released; one more is allowed while fewer than `L`
//! slots are taken. A slot has an id, so that a take, a renewal and a release may each be sent
//! twice: the second one changes nothing. A slot that is not renewed for its time to live `P` expires. So the slots of
//! a dead instance are free again after `P`.
//!
//! **Cost.** One key: about 30 bytes for each slot. Each operation takes at most logarithmic time in the number of
//! slots.
//!
//! **When not.** It does not limit how often: a fast request is free again immediately.
//!
//! **Source.** Semaphores with an expiring entry for each permit, such as Redisson's `RPermitExpirableSemaphore`.
//!
//! **Two quotas under one name.** Each slot has the time to live of the policy that took it. Slots count under both
//! quotas, and each quota compares their number with its own limit.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::strategy::{Ask, Params, Preview};
use super::{Mode, Quota, Verdict};
use crate::error::ConfigError;

/// A request may end at any time: a waiter checks again after this many microseconds.
const AGAIN: i64 = 100_000;

/// Maximum number of requests in flight.
const MAX: u32 = 1_000_000;
/// The time to live of a slot.
const SLOT_TTLS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3_600);
/// The longest of these, in microseconds.
const LONGEST_TTL: i64 = 3_600_000_000;

/// Checks that a quota can be a number of requests and the time to live of their slots.
pub(super) fn check(quota: Quota) -> Result<(), ConfigError> {
    let wrong = |problem| {
        Err(ConfigError::new(format!(
            "the quota `{quota}` cannot count requests in flight: {problem}; write the number of requests and the \
             slots' time to live, like `10/30s`"
        )))
    };
    match quota {
        _ if quota.capacity() != quota.limit() => wrong("they have no burst"),
        _ if quota.limit() > MAX => wrong("more than 1000000 requests"),
        _ if !SLOT_TTLS.contains(&quota.period()) => {
            wrong("the time to live is not from 1 second to 1 hour")
        }
        _ => Ok(()),
    }
}

/// Identifies the slot of one request [in flight](crate::Policy::in_flight): see
/// [`Check::slot`](crate::check::Check::slot).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(NonZeroU64);

impl SlotId {
    /// An id that no other slot has: it counts up from a random number of the process.
    pub(crate) fn unique() -> Self {
        use std::hash::BuildHasher;
        static NEXT: LazyLock<AtomicU64> =
            LazyLock::new(|| AtomicU64::new(std::hash::RandomState::new().hash_one("slots")));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }

    /// The id as bytes, for a store.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.get().to_be_bytes()
    }
}

/// Boxed, so that the states of strategies stay small.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State(Box<Slots>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Slots {
    /// When each expires.
    expiries: HashMap<SlotId, i64>,
    /// All slots, the first to expire first.
    by_expiry: BTreeSet<(i64, SlotId)>,
}

impl Slots {
    fn latest(&self) -> i64 {
        self.by_expiry.last().map_or(0, |(expiry, _)| *expiry)
    }

    fn set(&mut self, slot: SlotId, expiry: i64) {
        if let Some(before) = self.expiries.insert(slot, expiry) {
            self.by_expiry.remove(&(before, slot));
        }
        self.by_expiry.insert((expiry, slot));
    }

    fn remove(&mut self, slot: SlotId) {
        if let Some(expiry) = self.expiries.remove(&slot) {
            self.by_expiry.remove(&(expiry, slot));
        }
    }

    /// Removes the slots that have expired. Slots that another clock has left in the future expire when the longest
    /// could.
    fn pass_to(&mut self, now: i64) {
        while let Some(&(expiry, slot)) = self.by_expiry.first()
            && expiry <= now
        {
            self.remove(slot);
        }
        let bound = now + LONGEST_TTL;
        while let Some(&(expiry, slot)) = self.by_expiry.last()
            && expiry > bound
        {
            self.set(slot, bound);
        }
    }
}

impl State {
    /// The answer of its policy. It does not bound the grants of other policies: a slot is not part of their cost.
    pub(super) fn preview(&self, params: &Params, ask: &Ask) -> Preview {
        let Slots {
            expiries,
            by_expiry,
        } = &*self.0;
        let expired = by_expiry
            .iter()
            .take_while(|(expiry, _)| *expiry <= ask.now)
            .count();
        let room = params.capacity - (by_expiry.len() - expired) as i64;
        let is_taken = || {
            ask.slot
                .and_then(|slot| expiries.get(&slot))
                .is_some_and(|expiry| *expiry > ask.now)
        };
        let (needs, grants) = match ask.mode {
            Mode::Peek => (1, 0),
            // Taken again, it is the same slot.
            Mode::Take | Mode::TakeAhead | Mode::UpTo if room < 1 && is_taken() => (i64::MIN, 1),
            Mode::Take | Mode::TakeAhead | Mode::UpTo => (1, 1),
            Mode::Reset => (i64::MIN, params.capacity - room),
            Mode::Renew | Mode::Release => (i64::MIN, 1),
            Mode::Charge | Mode::Refund => (i64::MIN, 0),
        };
        let (grants, max) = if room < needs {
            (0, -1)
        } else {
            (grants, i64::MAX)
        };
        Preview {
            registers: [0; 3],
            dirty: false,
            room,
            needs,
            grants,
            max,
        }
    }

    /// Decides, and takes or releases the slot: the verdict, and whether that was done; of a reset, how many slots there
    /// were. A `max` below 0 is of a check that another policy denies.
    pub(super) fn decide(&mut self, params: &Params, ask: &Ask, max: i64) -> (Verdict, i64) {
        let Preview {
            room,
            needs,
            grants,
            ..
        } = self.preview(params, ask);
        let slots = &mut *self.0;
        slots.pass_to(ask.now);
        let granted = if max < 0 { 0 } else { grants };
        match (ask.mode, ask.slot) {
            (Mode::Reset, _) => *slots = Slots::default(),
            (Mode::Release, Some(slot)) => slots.remove(slot),
            (_, Some(slot)) if granted > 0 => {
                let expiry = slots
                    .expiries
                    .get(&slot)
                    .copied()
                    .unwrap_or(0)
                    .max(ask.now + params.period);
                slots.set(slot, expiry);
            }
            _ => {}
        }
        let count = slots.by_expiry.len() as i64;
        let remaining = (params.capacity - count).max(0);
        let reset = if count > 0 {
            slots.latest() - ask.now
        } else {
            0
        };
        (
            Verdict {
                remaining,
                wait: if room < needs { AGAIN } else { 0 },
                reset,
            },
            granted,
        )
    }
}
