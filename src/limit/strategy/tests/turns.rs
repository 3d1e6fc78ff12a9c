//! Turns that are reserved ahead, some of them given up or settled below their cost. In any order, the
//! used units stay within the quota.

use super::*;
use crate::limit::{Decision, Source, Verdicts};

const START: i64 = 1_790_000_000_000_000;

/// A caller whose requests reserve turns, leave before they are due, and are settled afterwards.
struct Turns {
    policies: Policies,
    states: [State; 1],
    now: i64,
    /// The turns that are not due yet, with the times at which they are.
    waiting: Vec<(Decision, i64)>,
    /// The indexes in `used` of requests that are not settled yet, with their decisions.
    unsettled: Vec<(usize, Decision)>,
    /// The times of the passed requests, and their costs.
    used: Vec<(i64, i64)>,
    refunded: i64,
}

impl Turns {
    fn new(policy: Policy) -> Self {
        Self {
            states: [State::fresh(policy.kind())],
            policies: policy.into(),
            now: START,
            waiting: vec![],
            unsettled: vec![],
            used: vec![],
            refunded: 0,
        }
    }

    fn decide(&mut self, check: &Check) -> Decision {
        let verdicts = Verdicts {
            at: self.now,
            ..check.decide(&mut self.states, self.now)
        };
        check.clone().answer(verdicts, Source::Redis)
    }

    /// A request that waits for at most `within` microseconds.
    fn join(&mut self, cost: u32, within: u64) {
        let within = Duration::from_micros(within);
        let turn = self.decide(&Check::take_ahead(
            Key::GLOBAL,
            &self.policies,
            cost,
            within,
        ));
        match turn.due_in() {
            Some(due_in) => self
                .waiting
                .push((turn, self.now + due_in.as_micros() as i64)),
            None if turn.granted() > 0 => self.used.push((self.now, cost.into())),
            None => {}
        }
    }

    fn refund(&mut self, charge: &Decision, cost: u32) -> i64 {
        let refund = charge.refund(Key::GLOBAL, cost, Duration::ZERO);
        let refunded = refund.map_or(0, |refund| self.decide(&refund).granted().into());
        self.refunded += refunded;
        refunded
    }

    /// The waiter at this index leaves. Returns `true` if its turn is refunded: any other turn is
    /// unused, as the last one of a process is.
    fn leave(&mut self, index: usize) -> bool {
        let (turn, _) = self.waiting.swap_remove(index);
        self.refund(&turn, turn.granted()) > 0
    }

    /// Sets the time. The due turns pass.
    fn pass_to(&mut self, now: i64) {
        self.now = now;
        let due = self.waiting.extract_if(.., |(_, due)| *due <= now);
        for (turn, due) in due {
            self.unsettled.push((self.used.len(), turn.clone().due()));
            self.used.push((due, turn.granted().into()));
        }
    }

    /// A request whose real cost is lower by `back`.
    fn settle(&mut self, index: usize, back: u32) {
        let (index, charge) = self.unsettled.swap_remove(index);
        self.refund(&charge, back.min(charge.granted()));
        self.used[index].1 -= i64::from(back.min(charge.granted()));
    }

    /// Returns the largest excess over the burst, in microseconds of the rate. A turn is due up to a
    /// microsecond late, in which an empty bucket cannot drain.
    fn excess(&self) -> i64 {
        let params = self.policies[0].params();
        let mut used = self.used.clone();
        used.sort_unstable();
        let (mut level, mut at, mut excess) = (0_i64, START, 0);
        for (time, cost) in used {
            level = (level - (time - at) * params.ticks).max(0) + cost * params.interval;
            at = time;
            excess = excess.max(level - params.full);
        }
        excess / params.ticks
    }
}

fn gradual() -> impl Iterator<Item = Strategy> {
    let all = Strategy::ALL.iter().copied();
    all.filter(|strategy| strategy.frees().is_gradual())
}

/// Waiters join, leave and settle in any order, and others take without waiting.
#[test]
fn turns_given_up_never_exceed_the_burst() {
    let (mut refunded, mut kept) = (0, 0);
    for seed in 0..1_500 {
        let mut rng = Rng::with_seed(seed);
        let strategy = rng.choice(gradual().collect::<Vec<_>>()).unwrap();
        let (limit, period) = (rng.u32(1..200), rng.u64(10_000..10_000_000));
        let quota = Quota::per(limit, Duration::from_micros(period)).burst(rng.u32(1..=2 * limit));
        let policy = Policy::new("p", strategy, quota).unwrap();
        let context = format!("seed {seed}, {policy:?}");
        let mut turns = Turns::new(policy);
        for _ in 0..100 {
            match rng.u8(..10) {
                0..=3 => {
                    let cost = match rng.u8(..3) {
                        0 => quota.capacity(),
                        1 => rng.u32(1..=quota.capacity()),
                        _ => 1,
                    };
                    turns.join(cost, rng.u64(..=5 * period));
                }
                4..=6 if !turns.waiting.is_empty() => {
                    let index = rng.usize(..turns.waiting.len());
                    match turns.leave(index) {
                        true => refunded += 1,
                        false => kept += 1,
                    }
                }
                7 if !turns.unsettled.is_empty() => {
                    let index = rng.usize(..turns.unsettled.len());
                    turns.settle(index, rng.u32(1..=quota.capacity()));
                }
                _ => {
                    let due = rng.choice(&turns.waiting).map_or(0, |(_, due)| *due);
                    let next = turns.now + rng.i64(0..=period as i64 / 4);
                    turns.pass_to(next.max(due));
                }
            }
        }
        turns.pass_to(turns.now + 10 * period as i64);
        assert_eq!(turns.excess(), 0, "{context}: {:?}", turns.used);
    }
    assert!(
        refunded > 1_000 && kept > 1_000,
        "{refunded} turns were refunded, {kept} were not"
    );
}

/// The picture of the module `meter`: one request passes, and two reserve turns.
#[test]
fn only_the_last_turn_is_refunded() {
    for strategy in gradual() {
        let policy = Policy::new("p", strategy, Quota::per_second(1)).unwrap();
        let mut turns = Turns::new(policy);
        for _ in 0..3 {
            turns.join(1, 10_000_000);
        }
        let [(first, first_due), (last, last_due)] = &turns.waiting[..] else {
            panic!("{strategy:?}: {:?}", turns.waiting);
        };
        assert_eq!(
            [first_due - START, last_due - START],
            [1_000_000, 2_000_000]
        );
        let (first, last) = (first.clone(), last.clone());
        turns.now += 500_000;
        assert_eq!(turns.refund(&first, 1), 0, "{strategy:?}: a turn follows");
        assert_eq!(turns.refund(&last, 1), 1, "{strategy:?}");
        assert_eq!(
            turns.refund(&first, 1),
            1,
            "{strategy:?}: it is the last now"
        );
        turns.join(1, 10_000_000);
        let due = turns.waiting.last().map(|(_, due)| due - START);
        assert_eq!(due, Some(1_000_000), "{strategy:?}: when the first was due");
    }
}

/// Some waiters of two processes leave. In a process the turn of a waiter that has left serves the next
/// waiter with that cost. A turn without such a waiter is refunded, or expires unused.
#[test]
fn turns_given_up_leave_the_quota_usable() {
    const SECONDS: i64 = 1_000;
    let mut rng = Rng::with_seed(1);
    let policy = Policy::new("p", Strategy::Gcra, "100/s burst 20").unwrap();
    let mut turns = Turns::new(policy);
    let mut left: Vec<(u8, Decision, i64)> = vec![];
    while turns.now < START + SECONDS * 1_000_000 {
        // The demand is three times the quota.
        for process in 0..2 {
            let cost = [1, 5, 20][rng.usize(..3)];
            let of_cost = left
                .iter()
                .position(|(owner, turn, _)| *owner == process && turn.granted() == cost);
            match of_cost.map(|index| left.swap_remove(index)) {
                Some((_, turn, due)) => turns.waiting.push((turn, due)),
                None => turns.join(cost, 2_000_000),
            }
            if rng.u8(..4) == 0 && !turns.waiting.is_empty() {
                let index = rng.usize(..turns.waiting.len());
                let (turn, due) = turns.waiting[index].clone();
                if !turns.leave(index) {
                    left.push((process, turn, due));
                }
            }
        }
        turns.pass_to(turns.now + 60_000);
        left.retain(|(_, _, due)| *due > turns.now);
    }
    let used: i64 = turns.used.iter().map(|(_, cost)| cost).sum();
    let share = used as f64 / (100 * SECONDS) as f64;
    println!("{:.1} % of the quota is used", 100.0 * share);
    assert_eq!(turns.excess(), 0);
    assert!(share > 0.9, "{share} of the quota is used");
}
