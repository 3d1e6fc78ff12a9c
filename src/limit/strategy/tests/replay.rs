//! Takes that Redis has decided, and that are decided again from the level of their meter.

use super::*;

const START: i64 = 1_790_000_000_000_000;

#[test]
fn equal_takes_are_replayed_from_one_level() {
    let mut rng = Rng::with_seed(1);
    for strategy in Strategy::ALL {
        if !strategy.frees().is_gradual() {
            continue;
        }
        for _ in 0..5_000 {
            let policy = Policy::new("test", *strategy, quota(&mut rng, *strategy)).unwrap();
            let capacity = policy.quota().capacity();
            let mut state = State::fresh(policy.kind());
            let debt = rng.i64(0..=2 * i64::from(capacity));
            Mode::Charge.count(&policy, &mut state, debt, START);
            let now = START + rng.i64(0..policy.params().period);
            let [level, ..] = preview(&state, policy.params(), now).registers;
            let part = rng.u32(1..=4);
            let cost = rng.u32(0..=capacity / part + 1);
            for earlier in 0..4 {
                let taken = Mode::Take.decide(&policy, &mut state, cost.into(), now);
                let replayed = State::replay_take(&policy, now, level, cost, earlier);
                assert_eq!(replayed, Some(taken), "{policy:?}: {earlier}");
            }
        }
    }
}
