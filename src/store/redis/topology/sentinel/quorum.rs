//! Combines the reports of several sentinels, which may be cut off from each other.

use std::fmt;

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
    /// The reported servers, with the number of sentinels that reported each.
    votes: Vec<(Master, usize)>,
    failure: StoreError,
}

impl Quorum {
    /// Creates an empty quorum of this number of sentinels.
    pub(super) fn new(sentinels: usize) -> Self {
        Self {
            sentinels,
            votes: vec![],
            failure: StoreError::new(ErrorKind::Unreachable),
        }
    }

    pub(super) fn add(&mut self, answer: Result<Master, StoreError>) {
        match answer {
            Ok(master) => match self
                .votes
                .iter_mut()
                .find(|(reported, _)| reported.is_at(&master))
            {
                Some((reported, votes)) => {
                    reported.epoch = reported.epoch.max(master.epoch);
                    *votes += 1;
                }
                None => self.votes.push((master, 1)),
            },
            Err(error) => {
                self.failure = self.failure.clone().or_telling(error);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.votes.is_empty()
    }

    fn is_majority(&self, votes: usize) -> bool {
        votes > self.sentinels / 2
    }

    /// Returns `true` if most sentinels agree.
    pub(super) fn is_decided(&self) -> bool {
        self.votes.iter().any(|(_, votes)| self.is_majority(*votes))
    }

    /// Returns the candidates, best first: by majority, then by epoch. Of equal epochs the `known`
    /// master comes first, so that a stale sentinel does not replace it while the others are
    /// silent. The `known` master also precedes all reports of an earlier epoch that are not
    /// unanimous: in a failover, most sentinels report the former master for a second longer than
    /// the first one. Also returns the error if there is no candidate.
    pub(super) fn end(mut self, known: Option<Master>) -> (Vec<Master>, StoreError) {
        let known_epoch = known.as_ref().map_or(0, |known| known.epoch);
        let all = self.sentinels;
        let is_unanimous = |votes: usize| votes == all;
        let known_at = known.clone();
        if !self.votes.iter().any(|(_, votes)| is_unanimous(*votes))
            && let Some(known) = known
        {
            match self
                .votes
                .iter_mut()
                .find(|(reported, _)| reported.is_at(&known))
            {
                Some((reported, _)) => reported.epoch = reported.epoch.max(known.epoch),
                None => self.votes.push((known, 0)),
            }
        }
        let mut reported = std::mem::take(&mut self.votes);
        reported.sort_by_key(|(master, votes)| {
            let is_of_now = is_unanimous(*votes) || master.epoch >= known_epoch;
            let is_known = known_at.as_ref().is_some_and(|known| known.is_at(master));
            std::cmp::Reverse((
                is_of_now,
                self.is_majority(*votes),
                master.epoch,
                is_known,
                *votes,
            ))
        });
        (
            reported.into_iter().map(|(master, _)| master).collect(),
            self.failure,
        )
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
