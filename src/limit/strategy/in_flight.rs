//! Requests in flight: how many of a caller run at the same moment.
//!
//! **Idea.** A request that passes holds one until it is released, whatever it costs; one more is allowed while less than
//! `L` are held. Each instance has a number, and the state has an entry for each instance that holds some: how many, and
//! when it last told so. An entry that was not renewed for the lease time `P` counts no longer. So what an instance held
//! that has died is free again after `P`, and a state is as large as there are instances that hold some, however many
//! requests these have.
//!
//! **Cost.** One key, read and written whole: 22 bytes for each instance that holds some.
//!
//! **When not.** It says nothing of how often. A fast request is free again at once.
//!
//! **Source.** Semaphores by leases, such as Redisson's `RPermitExpirableSemaphore`, which has an entry for each permit.
//!
//! **Two quotas under one name.** Each entry has the lease time of who wrote it. What is held counts under both, and each
//! compares it with its own limit.

use super::algorithm::{Algorithm, Registers};
use super::{Params, Snapshot};
use crate::limit::Charged;

/// A request may end at any time: who waits asks again after so many microseconds.
const AGAIN: i64 = 100_000;

/// Boxed, so that those of other strategies take no more memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State(Box<Holders>);

/// Asked by one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holders {
    own: Holder,
    /// A local store is asked by one instance, so that it has others only if it goes on from another store.
    others: Vec<Holder>,
}

/// An instance that holds some.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Holder {
    instance: u64,
    count: i64,
    /// When it last told so.
    told: i64,
    /// For how long that is good.
    lease: i64,
}

impl Holder {
    /// The same at `now`: none whose lease has ended.
    fn at(self, now: i64) -> Option<Self> {
        let told = self.told.min(now);
        (told + self.lease > now).then_some(Self { told, ..self })
    }
}

/// Registers: what this instance holds, what the others do, and when the last of theirs ends.
impl Algorithm for State {
    const COUNTS_REQUESTS: bool = true;

    fn load(&self, _params: &Params, now: i64) -> (Registers, bool) {
        let own = self.0.own.at(now).map_or(0, |own| own.count);
        let (mut others, mut latest) = (0, 0);
        for other in self.0.others.iter().filter_map(|other| other.at(now)) {
            (others, latest) = (others + other.count, latest.max(other.told + other.lease));
        }
        let future = self.0.own.told > now || self.0.others.iter().any(|other| other.told > now);
        ([own, others, latest], future)
    }

    fn room(params: &Params, _now: i64, [own, others, _]: Registers) -> i64 {
        params.capacity - own - others
    }

    fn wait(&self, _params: &Params, _now: i64, _cost: i64, _loaded: Registers) -> i64 {
        AGAIN
    }

    fn charge(&mut self, _params: &Params, _now: i64, cost: i64, [own, others, latest]: Registers) -> Registers {
        [(own + cost).max(0), others, latest]
    }

    /// However long ago it was taken.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        _of: &Charged,
        registers: Registers,
    ) -> (Registers, i64) {
        (self.charge(params, now, -cost, registers), cost.min(registers[0]))
    }

    fn reset_after(params: &Params, now: i64, [own, _, latest]: Registers) -> i64 {
        (latest - now).max(if own > 0 { params.period } else { 0 }).max(0)
    }

    fn save(&mut self, params: &Params, now: i64, _cost: i64, [own, ..]: Registers) {
        self.0.own = match own {
            0 => Holder { instance: self.0.own.instance, ..Holder::default() },
            count => Holder { count, told: now, lease: params.period, ..self.0.own },
        };
        self.0.others = self.0.others.iter().filter_map(|other| other.at(now)).collect();
    }

    fn resume(_params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        let other = Holder { instance: u64::MAX, count: used, told: now, lease: until - now };
        Self(Box::new(Holders { own: Holder::default(), others: vec![other] }))
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

/// The definition, of an instance that gives nothing back: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, _cost: i128, now: i128) -> bool {
    let last = model.grants.last().map_or(i128::MIN / 2, |(time, _)| *time);
    let held = if last + model.period > now { model.grants.len() } else { 0 };
    (held as i128) < model.limit
}
