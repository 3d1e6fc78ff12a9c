//! Combines the reports of several sentinels, which may be cut off from each other.

use std::cmp::Reverse;
use std::{fmt, mem};

use crate::error::{ErrorKind, StoreError};

/// The address of the master, as a sentinel reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Master {
    pub(super) host: Box<str>,
    pub(super) port: u16,
    /// The epoch of the failover that made it the master. Each failover has a higher one.
    pub(super) epoch: u64,
}

impl Master {
    pub(super) fn is_at(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[derive(Debug)]
pub(super) struct Quorum {
    sentinels: usize,
    candidates: Vec<Candidate>,
    failure: StoreError,
}

/// A server that may be the master.
#[derive(Debug)]
struct Candidate {
    master: Master,
    /// Number of sentinels that have reported it.
    votes: usize,
}

/// The better candidate has the higher rank. The first field that differs decides.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// In a failover, most sentinels report the former master for a second longer than the first one. So only a unanimous
    /// report may be of an earlier epoch than that of the known master.
    is_of_known_epoch: bool,
    has_majority: bool,
    epoch: u64,
    /// A stale sentinel does not replace the known master while the others are silent.
    is_known: bool,
    votes: usize,
}

impl Quorum {
    /// Creates an empty quorum of this number of sentinels.
    pub(super) fn new(sentinels: usize) -> Self {
        Self {
            sentinels,
            candidates: vec![],
            failure: StoreError::new(ErrorKind::Unreachable),
        }
    }

    pub(super) fn add(&mut self, answer: Result<Master, StoreError>) {
        match answer {
            Ok(master) => self.candidate(master).votes += 1,
            Err(error) => self.failure = self.failure.clone().or_telling(error),
        }
    }

    /// Returns the candidate at this address, with the later epoch.
    fn candidate(&mut self, master: Master) -> &mut Candidate {
        let mut known = self.candidates.iter();
        let place = known.position(|candidate| candidate.master.is_at(&master));
        let place = place.unwrap_or(self.candidates.len());
        if place == self.candidates.len() {
            self.candidates.push(Candidate { master, votes: 0 });
        } else {
            let epoch = &mut self.candidates[place].master.epoch;
            // A sentinel that was cut off may report an older epoch of the same master.
            *epoch = master.epoch.max(*epoch);
        }
        &mut self.candidates[place]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.candidates.is_empty()
    }

    fn is_majority(&self, votes: usize) -> bool {
        votes > self.sentinels / 2
    }

    /// Returns `true` if most sentinels agree.
    pub(super) fn is_decided(&self) -> bool {
        let mut candidates = self.candidates.iter();
        candidates.any(|candidate| self.is_majority(candidate.votes))
    }

    /// Returns the candidates, best first, and the error for an empty list. The `known` master is a candidate too, unless
    /// all sentinels agree.
    pub(super) fn end(mut self, known: Option<Master>) -> (Vec<Master>, StoreError) {
        let mut candidates = self.candidates.iter();
        let is_unanimous = candidates.any(|candidate| candidate.votes == self.sentinels);
        // The sentinels that lack may have elected the known master.
        if !is_unanimous && let Some(known) = &known {
            self.candidate(known.clone());
        }
        let mut candidates = mem::take(&mut self.candidates);
        candidates.sort_by_key(|candidate| Reverse(self.rank(candidate, known.as_ref())));
        let best_first = candidates.into_iter().map(|candidate| candidate.master);
        (best_first.collect(), self.failure)
    }

    fn rank(&self, candidate: &Candidate, known: Option<&Master>) -> Rank {
        let Candidate { master, votes } = candidate;
        let is_unanimous = *votes == self.sentinels;
        Rank {
            // A lower epoch is from before the last failover, unless all sentinels were recreated and count from 0 again.
            is_of_known_epoch: match known {
                Some(known) => is_unanimous || master.epoch >= known.epoch,
                None => true,
            },
            has_majority: self.is_majority(*votes),
            epoch: master.epoch,
            is_known: known.is_some_and(|known| known.is_at(master)),
            votes: *votes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn master(host: &str, epoch: u64) -> Master {
        Master {
            host: host.into(),
            port: 6379,
            epoch,
        }
    }

    fn quorum(sentinels: usize, reported: &[(&str, u64)]) -> Quorum {
        let mut quorum = Quorum::new(sentinels);
        reported
            .iter()
            .for_each(|(host, epoch)| quorum.add(Ok(master(host, *epoch))));
        quorum
    }

    #[test]
    fn most_decide_and_else_the_latest() {
        for (sentinels, reported, known, expected, decided) in [
            (1, &[("a", 1)][..], None, &["a"][..], true),
            (3, &[("a", 1)], None, &["a"], false),
            (3, &[("a", 1), ("a", 1)], None, &["a"], true),
            // One sentinel is cut off from the others.
            (
                3,
                &[("old", 1), ("a", 2), ("a", 2)],
                None,
                &["a", "old"],
                true,
            ),
            (
                3,
                &[("old", 9), ("a", 2), ("a", 2)],
                None,
                &["a", "old"],
                true,
            ),
            // One is cut off, one is dead, or one has just led a failover.
            (3, &[("old", 1), ("a", 2)], None, &["a", "old"], false),
            (
                4,
                &[("old", 1), ("old", 1), ("a", 2)],
                None,
                &["a", "old"],
                false,
            ),
            // Without a majority, the known master is as credible as a single report.
            (3, &[("old", 1)], Some(("a", 2)), &["a", "old"], false),
            (3, &[("a", 3)], Some(("old", 2)), &["a", "old"], false),
            (3, &[("stray", 2)], Some(("a", 2)), &["a", "stray"], false),
            (
                5,
                &[("stray", 2), ("stray", 2)],
                Some(("a", 2)),
                &["a", "stray"],
                false,
            ),
            (3, &[("b", 2), ("b", 2)], Some(("a", 2)), &["b", "a"], true),
            (3, &[], Some(("a", 2)), &["a"], false),
            (3, &[("a", 2)], Some(("a", 2)), &["a"], false),
            // During a failover: most sentinels do not report it yet.
            (
                3,
                &[("old", 1), ("old", 1)],
                Some(("a", 2)),
                &["a", "old"],
                true,
            ),
            (
                3,
                &[("old", 1), ("a", 2), ("old", 1)],
                Some(("a", 2)),
                &["a", "old"],
                true,
            ),
            (
                3,
                &[("a", 3), ("a", 3)],
                Some(("old", 2)),
                &["a", "old"],
                true,
            ),
            // The sentinels were recreated, and count failovers from 0.
            (
                3,
                &[("a", 0), ("a", 0)],
                Some(("old", 9)),
                &["old", "a"],
                true,
            ),
            (
                3,
                &[("a", 0), ("a", 0), ("a", 0)],
                Some(("old", 9)),
                &["a"],
                true,
            ),
            (3, &[], None, &[], false),
        ] {
            let quorum = quorum(sentinels, reported);
            assert_eq!(quorum.is_decided(), decided, "{reported:?}");
            let (tried, _) = quorum.end(known.map(|(host, epoch)| master(host, epoch)));
            assert!(
                tried
                    .iter()
                    .map(|master| &*master.host)
                    .eq(expected.iter().copied()),
                "{reported:?}: {tried:?}"
            );
        }
    }

    #[test]
    fn the_error_names_what_to_fix() {
        let mut quorum = Quorum::new(3);
        for kind in [
            ErrorKind::Unreachable,
            ErrorKind::Authentication,
            ErrorKind::Timeout,
        ] {
            quorum.add(Err(StoreError::new(kind)));
        }
        assert_eq!(quorum.end(None).1.kind(), ErrorKind::Authentication);
    }
}
