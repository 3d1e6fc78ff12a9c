//! Requests in flight: limits the concurrent requests of a caller. The Rust half of
//! `lua/in_flight.lua`.
//!
//! **Idea.** An allowed request holds a slot until the slot is released. A request is allowed while
//! fewer than `L` slots are held. A slot has an id, so a take, a renewal and a release may each be
//! sent twice: the second one changes nothing. A slot that is not renewed for its time to live `P`
//! expires. So the slots of a dead instance are freed after `P`.
//!
//! **Cost.** One key: about 30 bytes for each slot. Each operation takes at most logarithmic time
//! in the number of slots.
//!
//! **When not.** It does not limit the rate: the slot of a fast request is free again immediately.
//!
//! **Source.** Semaphores with an expiring entry for each permit, such as Redisson's
//! `RPermitExpirableSemaphore`.
//!
//! **Two quotas under one name.** Each slot has the time to live of the policy that took it. Slots
//! count under both quotas, and each quota compares their number with its own limit.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::strategy::{Ask, Params, Preview};
use super::{Mode, Quota, Verdict};
use crate::error::ConfigError;

/// The reported wait of a denial, in microseconds: a request may end at any time, so no better one
/// is known.
const RETRY_AFTER: i64 = 100_000;

/// Maximum number of requests in flight.
const MAX: u32 = 1_000_000;
/// Valid times to live of a slot.
const SLOT_TTLS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3_600);
/// Maximum time to live of a slot, in microseconds.
const LONGEST_TTL: i64 = 3_600_000_000;

/// Checks that a quota is a valid number of requests with a valid time to live of their slots.
pub(super) fn check(quota: Quota) -> Result<(), ConfigError> {
    let problem = if quota.capacity() != quota.limit() {
        "a burst is not supported"
    } else if quota.limit() > MAX {
        "the maximum is 1000000 requests"
    } else if !SLOT_TTLS.contains(&quota.period()) {
        "the time to live must be 1 second to 1 hour"
    } else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "invalid quota `{quota}` for requests in flight: {problem}; use the number of requests and the \
         slots' time to live, such as `10/30s`"
    )))
}

/// Identifies the slot of one request [in flight](crate::Policy::in_flight): see
/// [`Check::slot`](crate::check::Check::slot).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(NonZeroU64);

impl SlotId {
    /// Creates a process-wide unique id, and distinct from ids of other processes: ids count
    /// up from a random number.
    pub(crate) fn unique() -> Self {
        use std::hash::BuildHasher;
        static NEXT: LazyLock<AtomicU64> =
            LazyLock::new(|| AtomicU64::new(std::hash::RandomState::new().hash_one("slots")));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }

    /// Returns the id as bytes, for a store.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.get().to_be_bytes()
    }
}

/// The slots of one caller. Boxed, so that the states of strategies stay small.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State(Box<Slots>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Slots {
    /// The expiry of each slot.
    expiries: HashMap<SlotId, i64>,
    /// All slots, sorted by expiry.
    by_expiry: BTreeSet<(i64, SlotId)>,
}

impl Slots {
    fn holds(&self, slot: Option<SlotId>, now: i64) -> bool {
        match slot {
            Some(slot) => self.expiries.get(&slot).is_some_and(|expiry| *expiry > now),
            None => false,
        }
    }

    fn set(&mut self, slot: SlotId, expiry: i64) {
        // Both maps have the same slots: otherwise one would grow for ever.
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

    /// Removes expired slots. If another clock has set an expiry too far in the future, it becomes
    /// the latest possible one.
    fn pass_to(&mut self, now: i64) {
        while let Some(&(expiry, slot)) = self.by_expiry.first()
            && expiry <= now
        {
            self.remove(slot);
        }
        // After the clock went back, such slots would stay for too long.
        let bound = now + LONGEST_TTL;
        while let Some(&(expiry, slot)) = self.by_expiry.last()
            && expiry > bound
        {
            self.set(slot, bound);
        }
    }
}

impl State {
    /// Returns the id, in two halves, and the expiry of each slot.
    pub(super) fn to_numbers(&self) -> Vec<i64> {
        let mut numbers = Vec::with_capacity(3 * self.0.by_expiry.len());
        for (expiry, slot) in &self.0.by_expiry {
            let id = slot.0.get();
            // A number has less than 64 bits.
            let high = (id >> 32) as i64;
            let low = (id & u64::from(u32::MAX)) as i64;
            numbers.extend([high, low, *expiry]);
        }
        numbers
    }

    /// Restores the slots from their [numbers](Self::to_numbers). `None` if no slots have them.
    pub(super) fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let (entries, []) = numbers.as_chunks::<3>() else {
            return None;
        };
        let mut slots = Slots::default();
        for [high, low, expiry] in entries {
            let high = u32::try_from(*high).ok()?;
            let low = u32::try_from(*low).ok()?;
            let id = u64::from(high) << 32 | u64::from(low);
            slots.set(SlotId(NonZeroU64::new(id)?), *expiry);
        }
        Some(Self(Box::new(slots)))
    }

    /// Previews the policy's verdict. It does not bound the grants of other policies: a slot is not
    /// part of their cost.
    pub(super) fn preview(&self, params: &Params, ask: &Ask<'_>) -> Preview {
        let slots = &*self.0;
        let by_expiry = slots.by_expiry.iter();
        let expired = by_expiry.take_while(|(expiry, _)| *expiry <= ask.now);
        let held = slots.by_expiry.len() - expired.count();
        let room = params.capacity - held as i64;
        let (needs, grants) = match ask.mode {
            Mode::Peek => (1, 0),
            // This request already holds the slot.
            Mode::Take | Mode::TakeAhead | Mode::UpTo
                if room < 1 && slots.holds(ask.slot, ask.now) =>
            {
                (i64::MIN, 1)
            }
            Mode::Take | Mode::TakeAhead | Mode::UpTo => (1, 1),
            Mode::Reset => (i64::MIN, params.capacity - room),
            Mode::Renew | Mode::Release => (i64::MIN, 1),
            Mode::Charge | Mode::Refund => (i64::MIN, 0),
        };
        let is_denied = room < needs;
        Preview {
            registers: [0; 3],
            dirty: false,
            room,
            needs,
            grants: if is_denied { 0 } else { grants },
            max: if is_denied { -1 } else { i64::MAX },
        }
    }

    /// Decides, and takes, renews or releases the slot. Returns the verdict and 1 if that was done,
    /// or for a reset the number of slots. A `max` below 0 means that another policy denies the
    /// check.
    pub(super) fn decide(&mut self, params: &Params, ask: &Ask<'_>, max: i64) -> (Verdict, i64) {
        let Preview {
            room,
            needs,
            grants,
            ..
        } = self.preview(params, ask);
        let slots = &mut *self.0;
        slots.pass_to(ask.now);
        // A slot is not divided. If another policy denies the request, this one takes none.
        let granted = if max < 0 { 0 } else { grants };
        match (ask.mode, ask.slot) {
            (Mode::Reset, _) => *slots = Slots::default(),
            (Mode::Release, Some(slot)) => slots.remove(slot),
            (_, Some(slot)) if granted > 0 => {
                let renewed = ask.now + params.period;
                // A policy of the same name with a longer time to live may have taken the slot.
                let expiry = match slots.expiries.get(&slot) {
                    Some(before) => renewed.max(*before),
                    None => renewed,
                };
                slots.set(slot, expiry);
            }
            _ => {}
        }
        let count = slots.by_expiry.len() as i64;
        let reset = match slots.by_expiry.last() {
            Some((latest, _)) => latest - ask.now,
            None => 0,
        };
        (
            Verdict {
                remaining: (params.capacity - count).max(0),
                wait: if room < needs { RETRY_AFTER } else { 0 },
                reset,
            },
            granted,
        )
    }
}
