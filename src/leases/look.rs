use tokio::time::Instant;

use crate::limit::Order;

/// A look at how many the store counts, and how many it has to count then.
///
/// Takes and give-backs of which nobody had heard when it was sent may have come to the store before it or after it: where the
/// store tells the order of its decisions, that is known of each.
#[derive(Debug)]
pub(super) struct Look {
    /// How many were held when it was sent.
    pub(super) held: u32,
    /// How many the store has to count, in whatever order these have come, and in the order that is told.
    pub(super) certain: Range,
    pub(super) likely: Range,
    /// By how much each of these changes the count, of those that were answered before the look.
    early: Vec<(i64, Order)>,
    pub(super) seen: Option<Seen>,
    /// Whether the store may have counted otherwise.
    pub(super) is_doubtful: bool,
    /// Whether something that was lost before may come after it, and whether that is a give-back.
    pub(super) is_early: bool,
    pub(super) is_unsure: bool,
    /// When more of what was lost before has come.
    pub(super) again_at: Option<Instant>,
}

/// What a look has said.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) counted: i64,
    pub(super) order: Option<Order>,
    pub(super) at: Instant,
    /// Whether what is asked from then on is on another side.
    pub(super) is_split: bool,
}

/// So many, from the least to the most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) least: i64,
    pub(super) most: i64,
}

/// So many answers before its own a look keeps in mind.
const EARLY: usize = 1_000;

impl Look {
    /// Of so many that are held, and are being given back.
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

    /// The store counts so many more, or fewer. `is_now`: on the side of what is asked now.
    pub(super) fn came(&mut self, more: i64, is_now: bool, order: Option<Order>) {
        match (order, self.seen) {
            (_, Some(seen)) if seen.is_split && is_now => {}
            (Some(order), Some(Seen { order: Some(seen), .. })) => self.came_in_order(more, order < seen),
            (Some(order), None) if self.early.len() < EARLY => self.early.push((more, order)),
            _ => self.may_have_come(more),
        }
    }

    /// The store counted so many more, or fewer, before the look or after it: nobody knows.
    pub(super) fn may_have_come(&mut self, more: i64) {
        self.certain.may_be(more);
        self.likely.may_be(more);
    }

    fn came_in_order(&mut self, more: i64, before: bool) {
        self.certain.may_be(more);
        if before {
            self.likely = Range { least: self.likely.least + more, most: self.likely.most + more };
        }
    }

    /// It was answered.
    pub(super) fn sees(&mut self, seen: Seen) {
        self.seen = Some(seen);
        for (more, order) in std::mem::take(&mut self.early) {
            match seen.order {
                Some(seen) => self.came_in_order(more, order < seen),
                None => self.may_have_come(more),
            }
        }
    }
}

impl Range {
    fn may_be(&mut self, more: i64) {
        self.least += more.min(0);
        self.most += more.max(0);
    }

    /// By how much this is too many; too few below 0.
    pub(super) fn surplus(self, counted: i64) -> i64 {
        counted - counted.clamp(self.least, self.most)
    }
}
