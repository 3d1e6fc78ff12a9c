use std::mem;

use tokio::time::Instant;

use crate::limit::Order;

/// A question of how many the store counts, and how many it has to count at that moment.
///
/// Takes and releases that were not answered when it was sent may have come to the store before it or after it. A
/// store that says when it decided shows of each which it was.
pub(super) struct PendingSync {
    /// How many were held when it was sent.
    pub(super) held: u32,
    /// How many the store has to count, in whatever order these came; and in the order that it says.
    pub(super) certain: Range,
    pub(super) likely: Range,
    /// Those that were answered before the sync was: how many more each of them makes, and when it was decided.
    early: Vec<(i64, Order)>,
    pub(super) seen: Option<Seen>,
    /// Whether the store may have counted otherwise.
    pub(super) is_doubtful: bool,
    /// Whether something whose answer was lost may come after it, and whether that is a release.
    pub(super) is_early: bool,
    pub(super) is_unsure: bool,
    /// When more of that has come.
    pub(super) again_at: Option<Instant>,
}

/// What a sync has shown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) counted: i64,
    pub(super) order: Option<Order>,
    pub(super) at: Instant,
    /// Whether what is asked from then on is in another phase.
    pub(super) is_split: bool,
}

/// So many at least, and at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) least: i64,
    pub(super) most: i64,
}

/// Of so many that are answered before the sync it is noted when they were decided.
const EARLY: usize = 1_000;

impl PendingSync {
    /// While so many are held, and so many are being released.
    pub(super) fn new(held: u32, leaving: u32) -> Self {
        let count = i64::from(held) + i64::from(leaving);
        let range = Range { least: count, most: count };
        Self {
            held,
            certain: range,
            likely: range,
            early: Vec::new(),
            seen: None,
            is_doubtful: false,
            is_early: false,
            is_unsure: false,
            again_at: None,
        }
    }

    /// The store counts so many more, or fewer. `is_new` if that was asked in the phase of what is asked now.
    pub(super) fn counts(&mut self, more: i64, is_new: bool, order: Option<Order>) {
        match (order, self.seen) {
            (_, Some(seen)) if seen.is_split && is_new => {}
            (Some(order), Some(Seen { order: Some(seen), .. })) => self.counts_in_order(more, order < seen),
            (Some(order), None) if self.early.len() < EARLY => self.early.push((more, order)),
            _ => self.may_count(more),
        }
    }

    /// It may be that so many more, or fewer, were counted before the sync.
    pub(super) fn may_count(&mut self, more: i64) {
        self.certain.may_be(more);
        self.likely.may_be(more);
    }

    fn counts_in_order(&mut self, more: i64, before: bool) {
        self.certain.may_be(more);
        if before {
            self.likely.is(more);
        }
    }

    /// It was answered.
    pub(super) fn sees(&mut self, seen: Seen) {
        self.seen = Some(seen);
        for (more, order) in mem::take(&mut self.early) {
            self.counts(more, false, Some(order));
        }
    }
}

impl Range {
    /// So many more, or fewer.
    fn is(&mut self, more: i64) {
        (self.least, self.most) = (self.least + more, self.most + more);
    }

    /// Maybe so many more, or fewer.
    fn may_be(&mut self, more: i64) {
        (self.least, self.most) = (self.least + more.min(0), self.most + more.max(0));
    }

    /// By how much this is too many, or below 0 too few.
    pub(super) fn surplus(self, counted: i64) -> i64 {
        counted - counted.clamp(self.least, self.most)
    }
}
