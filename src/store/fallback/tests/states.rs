//! The states of the breaker.

use std::time::Duration;

use super::super::breaker::{Breaker, Pass};

/// A failure, and those of two trials.
fn fail(breaker: &Breaker) -> [bool; 3] {
    [(Pass::Free, 10), (Pass::Trial, 20), (Pass::Trial, 30)].map(|(pass, now)| breaker.failed(pass, false, now))
}

#[test]
fn opens_once_at_the_threshold_and_closes_once() {
    let breaker = Breaker::new(3);
    assert_eq!(fail(&breaker), [false, false, true]);
    assert!(breaker.is_open());
    assert!(!breaker.failed(Pass::Trial, false, 40), "it is open already");
    assert_eq!(breaker.close(1_000_030), Some(Duration::from_secs(1)));
    assert!(breaker.is_sound());
    assert_eq!(breaker.close(1_000_040), None);
}

#[test]
fn a_success_starts_the_count_again() {
    let breaker = Breaker::new(4);
    for _ in 0..10 {
        assert_eq!(fail(&breaker), [false; 3]);
        breaker.succeeded(Pass::Trial);
        assert!(breaker.is_sound());
    }
}

#[test]
fn failures_before_a_recovery_do_not_count_after_it() {
    let breaker = Breaker::new(4);
    fail(&breaker);
    breaker.close(40);
    assert_eq!(fail(&breaker), [false; 3]);
}

#[test]
fn what_was_under_way_counts_once() {
    let breaker = Breaker::new(2);
    assert!((0..100).all(|now| !breaker.failed(Pass::Free, false, now)));
    assert!(breaker.failed(Pass::Trial, false, 100));
    assert!(Breaker::new(1).failed(Pass::Free, false, 0));
    assert!(Breaker::new(3).failed(Pass::Free, true, 0), "a lasting one needs no other");
}

#[test]
fn in_doubt_one_check_at_a_time_is_let_through() {
    let breaker = Breaker::new(3);
    let admit = |now: i64| breaker.admit(|| now, Duration::from_micros(100));
    assert_eq!(admit(0), Some(Pass::Free));
    breaker.failed(Pass::Free, false, 0);
    assert_eq!([admit(0), admit(99), admit(100)], [Some(Pass::Trial), None, Some(Pass::Trial)]);
    // One that was under way before says nothing of the trial.
    breaker.failed(Pass::Free, false, 110);
    assert_eq!(admit(110), None);
    breaker.failed(Pass::Trial, false, 120);
    assert_eq!([admit(120), admit(120)], [Some(Pass::Trial), None]);
    breaker.learned_nothing(Pass::Trial);
    breaker.succeeded(Pass::Free);
    assert_eq!(admit(130), Some(Pass::Trial));
    breaker.succeeded(Pass::Trial);
    assert_eq!([admit(140), admit(140)], [Some(Pass::Free); 2]);
}

/// A check is still under way when the probe fails.
#[test]
fn a_probe_that_fails_lets_no_second_trial_through() {
    let breaker = Breaker::new(5);
    let admit = |now: i64| breaker.admit(|| now, Duration::from_micros(100));
    breaker.failed(Pass::Free, false, 0);
    assert_eq!(admit(0), Some(Pass::Trial));
    assert!(!breaker.failed(Pass::Probe, false, 10));
    assert_eq!(admit(20), None);
    assert!((0..2).all(|now| !breaker.failed(Pass::Probe, false, now)));
    assert!(breaker.failed(Pass::Probe, false, 30), "it counts");
    breaker.close(40);
    breaker.failed(Pass::Free, false, 50);
    breaker.succeeded(Pass::Probe);
    assert!(breaker.is_sound());
}

#[test]
fn probes_back_off_up_to_half_a_second() {
    let delays: Vec<u128> = (0..8).map(|probes| Breaker::delay(probes, 0.0).as_millis()).collect();
    assert_eq!(delays, [50, 100, 200, 400, 500, 500, 500, 500]);
    assert_eq!(Breaker::delay(u32::MAX, 1.0), Duration::from_millis(250));
}
