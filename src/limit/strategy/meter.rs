//! A meter: each charge raises its level, and it drains at the rate of the quota.
//!
//! [`LeakyBucket`](super::Strategy::LeakyBucket), [`Gcra`](super::Strategy::Gcra) and
//! [`TokenBucket`](super::Strategy::TokenBucket) are three descriptions of this algorithm. The level is that of the
//! leaky bucket, the backlog of GCRA (how far its theoretical arrival time lies in the future), and the number of
//! tokens missing in a token bucket. A token bucket refilled by the [interval](Refill::Interval) drains after each
//! period; all other meters drain every microsecond. The strategies keep separate counts.
//!
//! # Numbers
//!
//! A unit of cost is `interval` ticks, and a full meter `full` = capacity * `interval`. `ticks` drain each microsecond, or
//! after each period. [`Params`] chooses both so that `interval / ticks` is exact where possible, and no product reaches
//! 2^53.
//!
//! - **A take** of `c` ticks is allowed if `level + c <= full`. Otherwise its wait is `(level + c - full) / ticks`.
//! - **A turn** is a take ahead: it is charged now even if that exceeds `full`, and is due after that wait. So turns are due
//!   in the order in which they were charged, each when the level without the later ones has drained to `full`.
//! - **The end** of a charge is the time at which the level that it left behind has drained. A charge knows it: the
//!   `reset` of its decision minus its `age`.
//!
//! # Turns
//!
//! A quota of `1/s`, with a burst of 1. At 0 s, one request passes (P), and two reserve turns (A, B):
//!
//! ```text
//! level
//!   3 *                       P, A and B are charged
//!     | *
//!   2 |   *                   at 1 s, A is due: without B, the meter is full
//!     |     *
//!   1 |-------*------- full   at 2 s, B is due
//!     |         *
//!   0 +---+---+---*---
//!     0   1   2   3    s      P ends at 1 s, A at 2 s, B at 3 s
//! ```
//!
//! Now a waiter leaves, at 0.5 s and level 2.5:
//!
//! - **B, the last turn**, is refunded whole. The meter was not empty since B was charged, and nothing was charged after it,
//!   so the level is exactly B's cost above that of a meter without B. [`is_last`](Meter::is_last) recognizes it without a list of turns: the
//!   level drains exactly until its end, in 2.5 s. Then A is the last one.
//! - **A, before another turn**, is not refunded. B keeps its time, 2 s. With one unit less, the level would be 1.5, and the
//!   next turn would be due at 2 s too: two units at a time, with a burst of 1. So as long as the level is above `full`,
//!   which means that the last turn is not due yet, no other turn is refunded.
//! - **Once all turns are due**, a turn that is not the last is a plain charge, made when it was due. Under a meter that drains
//!   after each period, every turn is a plain charge.
//!
//! A plain charge is refunded even while turns are reserved. The next request may then get the time of a turn, so the burst
//! may be exceeded by the refunded units. The level is lower than the last turn's end says, so that turn is not recognized;
//! an earlier one may be, if it ends when the level does.
//!
//! # Refunds
//!
//! A refund of `r` ticks, of a charge of `c` ticks that is `a` microseconds old. The result must not be below the level
//! `y` of a meter that was charged `c - r` in the first place. Its level `x` is `r` above `y` after the charge, and both
//! drain equally, until `y` is empty: then `x` comes closer. With `c - r` charged, `y` cannot be empty sooner than
//! `(c - r) / ticks` after the charge, so
//!
//! ```text
//! x - y  >=  r - max(0, a * ticks - (c - r))  =  min(r, c - a * ticks)
//! ```
//!
//! This is what a refund deducts, if it is above 0. It is exact for a meter that held nothing else. Otherwise `y` was empty
//! later or never, but the level does not show it: what was charged before may have been refunded since. (The last turn
//! does show it, by its end.)
//!
//! A meter that drains after each period has `a` in periods: see [`drains_since`](Meter::drains_since).
//!
//! # Changed quotas
//!
//! A value names the quota that wrote it, its [`Writer`]. Another quota finds the used units as they have drained since at the
//! writer's rate, converts them to its own ticks, and decides on them. None of them is dropped because its burst is
//! smaller. It becomes the writer
//!
//! - with a grant;
//! - with a denied take, if its rate is faster: else a caller who was raised from `1/d` would wait for a day.
//!
//! A denied take of a slower quota changes nothing: else a caller who was lowered to `1/d` would wait for a day for each used
//! unit. Until a quota is the writer, it reports times at the faster of both rates.
//!
//! **Bound.** The level never drains faster than at the fastest rate of the quotas, and a grant leaves no more used units than
//! its own burst. So all quotas under one name together grant at most what the largest burst and the fastest rate give.
//! Under a bucket by the interval, a started interval counts for the next quota: two refills more.
//!
//! **Rounding.** A converted level is rounded up, by less than a millionth of a unit and one tick.
//!
//! **Refunds.** While the writer has not changed, a refund is as below. Afterwards, a charge counts as drained at the fastest
//! rate that has written the value since, or at its own. So a changed value remembers the fastest rate of its earlier
//! writers until their charges have drained. A bucket by the interval remembers the time of the change, and
//! nothing from before it is refunded.

use super::algorithm::{Algorithm, NO_PARAMETER, Refunded, Registers};
use super::params::MAX_TICKS;
use super::{Frees, Params, Refill, Snapshot, Strategy, Writer};
use crate::limit::PolicyCharge;

/// Precision of the end of a turn, in microseconds: its reset and its age are rounded.
const ROUNDING: i64 = 3;

/// The third register: this quota wrote the level, or will when it is saved.
const OWN: i64 = 0;
/// Another quota wrote the level, and drains it at least as fast as this one would.
const SLOWER: i64 = 1;
/// Another quota wrote the level, and drains it more slowly than this one would.
const FASTER: i64 = 2;

/// A separate type for each strategy, identified by its letter: shared functions would not be inlined, and a take would
/// execute 5 % more instructions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meter<const LETTER: char> {
    /// The time since which it drains.
    at: i64,
    /// The level at that time, in ticks of the writer.
    level: i64,
    /// The [code](Writer::code) of the quota that wrote the level; 0 before the first charge.
    writer: u64,
    /// Boxed, so that a state is no larger than other strategies'.
    rare: Option<Box<Rare>>,
}

/// The rare parts of a meter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rare {
    /// The [rest](Writer::rest) of the writer.
    rest: u64,
    /// Boxed, so that the rest alone takes less memory.
    changed: Option<Box<Changed>>,
}

/// The earlier writers of a level, while their charges can be refunded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Changed {
    /// The bits of a double: the fastest rate of the earlier writers. Under a meter that drains after each period, the time
    /// of the last change.
    mark: u64,
    /// The time at which everything that they had charged has drained.
    until: i64,
}

/// A level at some time, and the time since which it drains.
struct Drained {
    level: i64,
    at: i64,
}

/// Registers: the current level in ticks, the time since which the meter drains, and whether this quota wrote the level.
impl<const LETTER: char> Algorithm for Meter<LETTER> {
    fn frees(strategy: Strategy) -> Frees {
        if strategy == Strategy::TokenBucket(Refill::Interval) {
            Frees::InBatches
        } else {
            Frees::Gradually
        }
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        (strategy == Strategy::TokenBucket(Refill::Interval)).then(|| "interval".to_owned())
    }

    fn with_parameter(strategy: Strategy, text: &str) -> Result<Strategy, &'static str> {
        match (strategy, text) {
            (Strategy::TokenBucket(_), "greedy") => Ok(Strategy::TokenBucket(Refill::Greedy)),
            (Strategy::TokenBucket(_), "interval") => Ok(Strategy::TokenBucket(Refill::Interval)),
            (Strategy::TokenBucket(_), _) => Err("its refill is neither `greedy` nor `interval`"),
            _ => Err(NO_PARAMETER),
        }
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let is_future = self.at > now;
        if self.level == 0 {
            return ([0, now, OWN], is_future);
        }
        if !self.is_of(params) {
            return (self.load_changed(params, now), is_future);
        }
        let Drained { level, at } = self.drained(params, now);
        ([level, at, OWN], is_future)
    }

    fn room(params: &Params, _now: i64, [level, ..]: Registers) -> i64 {
        (params.full - level).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [level, at, by]: Registers) -> i64 {
        if by == SLOWER {
            return self.writers_wait(params, now, params.capacity - cost);
        }
        let over = level + cost * params.interval - params.full;
        Self::drains_in(params, now, over, at)
    }

    fn written(params: &Params, now: i64, [level, at, by]: Registers) -> Registers {
        if by == OWN || !Self::in_batches(params) {
            return [level, at, OWN];
        }
        // A started interval counts for one refill at most, which is due after this check.
        [level, at.max(now - params.period + 1), OWN]
    }

    fn denied(params: &Params, now: i64, registers: Registers) -> Option<Registers> {
        let [level, _, by] = registers;
        // A level that was lowered to the highest one would free used units under the writer.
        let is_exact = level < params.highest;
        (by == FASTER && is_exact).then(|| Self::written(params, now, registers))
    }

    fn charge(&mut self, params: &Params, now: i64, cost: i64, registers: Registers) -> Registers {
        let [level, at, _] = Self::written(params, now, registers);
        [level + cost * params.interval, at, OWN]
    }

    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        [level, at, by]: Registers,
    ) -> Refunded {
        // Under another policy, the charge may count for longer.
        if of.left() <= 0 {
            return ([level, at, by], 0);
        }
        // No grant is larger, and the products of larger ones might exceed 2^53.
        let most = 2 * params.capacity;
        let part = cost.min(most) * params.interval;
        let charge = of.cost.min(most) * params.interval;
        let is_turn = of.is_turn && !Self::in_batches(params);
        let changed = self.changed(now);
        let has_changed = by != OWN || changed.is_some();
        let left = if is_turn && !has_changed && Self::is_last(params, of, level) {
            part
        } else if is_turn && level > params.full {
            // Later turns are not due yet. Not even a part is refunded: new turns would be due at the same times.
            0
        } else {
            let drained = if has_changed {
                self.drained_by_any(params, now, of, [level, at, by])
            } else {
                Self::drains_since(params, now, of, at) * params.ticks
            };
            (charge - drained).clamp(0, part)
        };
        let refunded = left.min(level);
        let units = div_ceil(refunded, params.interval);
        if by == OWN || refunded == 0 {
            return ([level - refunded, at, by], units);
        }
        // The writer stays, and the level is in its ticks.
        self.refund_to_writer(params, now, level - refunded);
        let [level, at, _] = self.load(params, now).0;
        ([level, at, by], units)
    }

    fn reset_after(&self, params: &Params, now: i64, [level, at, by]: Registers) -> i64 {
        if by == SLOWER {
            return self.writers_wait(params, now, 0);
        }
        Self::drains_in(params, now, level, at)
    }

    #[inline(always)]
    fn save(&mut self, params: &Params, now: i64, _cost: i64, [level, at, by]: Registers) {
        if by != OWN {
            return self.save_of_writer(params, now);
        }
        if !self.is_of(params) {
            self.change_writer(params, now);
        }
        self.level = level;
        self.at = at;
    }

    fn is_of(&self, params: &Params) -> bool {
        let Writer { code, rest } = params.writer;
        self.writer == code && (rest == 0 || self.rest() == rest)
    }

    #[inline(always)]
    fn kept_until(&self, params: &Params, now: i64) -> i64 {
        if self.rare.is_none() && self.writer == params.writer.code {
            return 0;
        }
        self.kept_until_changed(params, now)
    }

    fn resume(params: &Params, now: i64, snapshot: Snapshot) -> Self {
        let Snapshot {
            used,
            until,
            writer,
        } = snapshot;
        if Self::in_batches(params) {
            // The meter must be empty at `until`, after whole periods. If the level needs more periods than are left
            // until then, as it may for a share of a quota, it is empty later; no period has ended yet.
            let level = used * params.interval;
            let periods = div_ceil(level, params.ticks).min(div_ceil(until - now, params.period));
            return Self::new(until - periods * params.period, level, params.writer);
        }
        let other = if writer == params.writer {
            None
        } else {
            Params::of_writer(writer, params.frees)
        };
        let (params, writer) = match &other {
            // The time means other units under the quota that was followed.
            Some(other) => (other, writer),
            None => (params, params.writer),
        };
        let level = (until - now).clamp(0, params.furthest) * params.ticks;
        Self::new(now, level, writer)
    }

    fn to_numbers(&self) -> Vec<i64> {
        let rest = self.rest();
        let mut numbers = vec![self.at, self.level];
        for bits in [self.writer, rest] {
            numbers.extend(halves(bits));
        }
        if let Some(changed) = self.rare.as_ref().and_then(|rare| rare.changed.as_ref()) {
            numbers.extend(halves(changed.mark));
            numbers.push(changed.until);
        }
        numbers
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let (&[at, level, code_low, code_high, rest_low, rest_high], changed) =
            numbers.split_first_chunk()?;
        let writer = Writer {
            code: joined(code_low, code_high)?,
            rest: joined(rest_low, rest_high)?,
        };
        let changed = match *changed {
            [] => None,
            [low, high, until] => Some(Changed {
                mark: joined(low, high)?,
                until,
            }),
            _ => return None,
        };
        if level > 0 {
            Params::of_writer(writer, Frees::Gradually)?;
        }
        let mut meter = Self::new(at, level, writer);
        meter.set_rare(writer.rest, changed);
        Some(meter)
    }
}

impl<const LETTER: char> Meter<LETTER> {
    /// Creates a meter with this level in ticks of the writer at time `at`.
    pub(crate) fn new(at: i64, level: i64, writer: Writer) -> Self {
        let mut meter = Self {
            at,
            level,
            writer: writer.code,
            rare: None,
        };
        meter.set_rare(writer.rest, None);
        meter
    }

    /// As [`new`](Self::new), for a level that Redis has reported: earlier quotas may have charged more than this one can.
    pub(crate) fn reported(at: i64, level: i64, params: &Params) -> Self {
        let mut meter = Self::new(at, level, params.writer);
        if level > params.deepest {
            let changed = Changed {
                mark: 0,
                until: i64::MAX,
            };
            meter.set_rare(params.writer.rest, Some(changed));
        }
        meter
    }

    #[cold]
    fn set_rare(&mut self, rest: u64, changed: Option<Changed>) {
        self.rare = if rest == 0 && changed.is_none() {
            None
        } else {
            Some(Box::new(Rare {
                rest,
                changed: changed.map(Box::new),
            }))
        };
    }

    /// Returns `true` if the meter drains after each period. For other strategies than the token bucket this is known
    /// at compile time.
    fn in_batches(params: &Params) -> bool {
        LETTER == 't' && params.frees == Frees::InBatches
    }

    fn rest(&self) -> u64 {
        self.rare.as_ref().map_or(0, |rare| rare.rest)
    }

    /// Returns the earlier writers, if their charges can still be refunded.
    fn changed(&self, now: i64) -> Option<Changed> {
        let changed = self.rare.as_ref()?.changed.as_ref()?;
        (changed.until > now).then_some(**changed)
    }

    /// Returns the numbers of the quota that wrote the level.
    fn writer_params(&self, params: &Params) -> Params {
        let writer = Writer {
            code: self.writer,
            rest: self.rest(),
        };
        // An invalid code is of an empty meter.
        match Params::of_writer(writer, params.frees) {
            Some(writer) => writer.shared_as(params),
            None => *params,
        }
    }

    /// Returns what is left at `now` under the quota that wrote the level.
    fn drained(&self, params: &Params, now: i64) -> Drained {
        // After the clock went back, the level starts to drain now.
        let since = self.at.min(now);
        let elapsed = now - since;
        // Another quota has charged more than this one can, unless another program has written the level.
        let highest = if self.at <= now && self.changed(now).is_some() {
            params.highest
        } else {
            params.deepest
        };
        let level = self.level.min(highest);
        let left = if Self::in_batches(params) {
            let due = elapsed.div_euclid(params.period);
            let periods = due.min(div_ceil(level, params.ticks));
            Drained {
                level: level - periods * params.ticks,
                at: since + periods * params.period,
            }
        } else {
            let drained = elapsed.saturating_mul(params.ticks);
            Drained {
                level: level.saturating_sub(drained),
                at: now,
            }
        };
        if left.level > 0 {
            return left;
        }
        // An empty meter drains from its next charge on.
        Drained { level: 0, at: now }
    }

    /// Loads a level that another quota wrote.
    #[cold]
    fn load_changed(&self, params: &Params, now: i64) -> Registers {
        let writer = self.writer_params(params);
        let Drained { level, at } = self.drained(&writer, now);
        if level == 0 {
            return [0, now, OWN];
        }
        let level = convert(level, writer.unit, params.unit);
        if params.rate <= writer.rate {
            return [level, at, SLOWER];
        }
        let [level, at, _] = Self::written(params, now, [level, at, FASTER]);
        [level, at, FASTER]
    }

    /// Returns the microseconds until no more than these units are used, at the rate of the writer.
    fn writers_wait(&self, params: &Params, now: i64, units: i64) -> i64 {
        let writer = self.writer_params(params);
        let Drained { level, at } = self.drained(&writer, now);
        // A share has fewer units in the same time.
        let instances = (params.interval / params.unit).max(1);
        let target = units.saturating_mul(writer.unit.saturating_mul(instances));
        Self::drains_in(&writer, now, (level - target).max(0), at)
    }

    /// Returns the ticks that have drained since a charge under this quota, at the fastest rate that may have drained them.
    #[cold]
    fn drained_by_any(
        &self,
        params: &Params,
        now: i64,
        of: &PolicyCharge,
        [_, at, by]: Registers,
    ) -> i64 {
        let changed = self.changed(now);
        if Self::in_batches(params) {
            // Another quota has written since, now or at the last change.
            let is_earlier = |changed: Changed| now - of.age < f64::from_bits(changed.mark) as i64;
            if by != OWN || changed.is_some_and(is_earlier) {
                return MAX_TICKS;
            }
            return Self::drains_since(params, now, of, at) * params.ticks;
        }
        let mut fastest = changed.map_or(0.0, |changed| f64::from_bits(changed.mark));
        if by != OWN {
            fastest = fastest.max(self.writer_params(params).rate);
        }
        if fastest <= params.rate {
            return Self::drains_since(params, now, of, at) * params.ticks;
        }
        let ticks = (of.age as f64 * fastest * params.unit as f64).ceil() + 1.0;
        ticks.min(MAX_TICKS as f64) as i64
    }

    /// Saves what has drained of a level that another quota wrote. It has been refunded already, or is from a clock
    /// that is ahead.
    #[cold]
    #[inline(never)]
    fn save_of_writer(&mut self, params: &Params, now: i64) {
        let writer = self.writer_params(params);
        let Drained { level, at } = self.drained(&writer, now);
        self.level = level;
        self.at = at;
    }

    #[inline(never)]
    fn kept_until_changed(&self, params: &Params, now: i64) -> i64 {
        let until = self.changed(now).map_or(0, |changed| changed.until);
        if self.is_of(params) {
            return until;
        }
        until.max(now + self.writers_wait(params, now, 0))
    }

    /// Lowers the level of the writer to this level under another quota.
    fn refund_to_writer(&mut self, params: &Params, now: i64, left: i64) {
        let writer = self.writer_params(params);
        let Drained { level, at } = self.drained(&writer, now);
        self.level = level.min(convert(left, params.unit, writer.unit));
        self.at = at;
    }

    /// Makes this quota the writer. The level is set afterwards.
    #[inline]
    fn change_writer(&mut self, params: &Params, now: i64) {
        let changed = if self.writer == 0 {
            None
        } else {
            self.change(params, now)
        };
        let Writer { code, rest } = params.writer;
        self.writer = code;
        if rest != 0 || changed.is_some() || self.rare.is_some() {
            self.set_rare(rest, changed);
        }
    }

    /// Returns the earlier writers after a change, if their charges can still be refunded.
    #[cold]
    fn change(&self, params: &Params, now: i64) -> Option<Changed> {
        let writer = self.writer_params(params);
        let mut until = now + self.writers_wait(params, now, 0);
        let mut fastest = writer.rate;
        if let Some(changed) = self.changed(now) {
            until = until.max(changed.until);
            fastest = fastest.max(f64::from_bits(changed.mark));
        }
        if until <= now {
            return None;
        }
        let mark = if Self::in_batches(params) {
            now as f64
        } else {
            fastest
        };
        Some(Changed {
            mark: mark.to_bits(),
            until,
        })
    }

    /// Returns the microseconds until `ticks` have drained.
    fn drains_in(params: &Params, now: i64, ticks: i64, at: i64) -> i64 {
        let times = div_ceil(ticks, params.ticks);
        if Self::in_batches(params) && times > 0 {
            at + times * params.period - now
        } else {
            times
        }
    }

    /// Returns `true` if the meter is empty when this turn ends: no charge follows it.
    fn is_last(params: &Params, of: &PolicyCharge, level: i64) -> bool {
        let left = of.left().min(params.furthest);
        (level - left * params.ticks).abs() <= ROUNDING * params.ticks
    }

    /// Returns the number of drains since a charge, at most [`Params::furthest`].
    ///
    /// A meter that drains every microsecond has drained as often as the charge is old. A meter that drains after each period
    /// counts the drains that were due at the charge, minus those still due. The grid of its periods starts with the first
    /// charge of an empty meter, so the age alone does not show how many have ended.
    fn drains_since(params: &Params, now: i64, of: &PolicyCharge, at: i64) -> i64 {
        let Params {
            period, furthest, ..
        } = *params;
        if !Self::in_batches(params) {
            return of.age.min(furthest);
        }
        let reset = of.reset.min(furthest * period);
        let due = div_ceil(reset, period);
        let end = now + (reset - of.age).max(0);
        // From a drain to the end are whole periods. The age may be wrong by less than half of one.
        let still_due = (end - at + period / 2).div_euclid(period);
        (due - still_due).clamp(0, furthest)
    }
}

/// `a / b`, rounded up. `b` is above zero.
fn div_ceil(a: i64, b: i64) -> i64 {
    if a <= 0 {
        return a / b;
    }
    // Unsigned, which a processor divides faster.
    (a as u64).div_ceil(b as u64) as i64
}

/// Converts ticks of a quota whose unit has `from` of them to ticks of one whose unit has `to`. Rounds up, by less than a
/// millionth of a unit and a tick, and saturates at [`MAX_TICKS`].
fn convert(level: i64, from: i64, to: i64) -> i64 {
    /// Parts of a unit.
    const PARTS: i64 = 1 << 20;
    if from == to {
        return level;
    }
    let units = level / from;
    let rest = level % from;
    // So that no product reaches 2^53.
    let scale = div_ceil(from, 1 << 32);
    let parts = div_ceil(div_ceil(rest, scale) * PARTS, from / scale).min(PARTS);
    let low = to % PARTS;
    let ticks = parts * (to / PARTS) + div_ceil(parts * low, PARTS);
    units
        .saturating_mul(to)
        .saturating_add(ticks)
        .min(MAX_TICKS)
}

/// Splits a number into two that a double represents.
fn halves(bits: u64) -> [i64; 2] {
    [(bits & u64::from(u32::MAX)) as i64, (bits >> 32) as i64]
}

fn joined(low: i64, high: i64) -> Option<u64> {
    let [low, high] = [u32::try_from(low).ok()?, u32::try_from(high).ok()?];
    Some(u64::from(high) << 32 | u64::from(low))
}
