use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

/// Times and costs, oldest first.
///
/// One pointer, and none before the first charge: a state is as large as the largest of any strategy, and a store holds
/// one for each caller.
#[allow(clippy::box_collection, reason = "a box is a quarter of a queue")]
#[derive(Debug, Clone, Default)]
pub(super) struct Charges(Option<Box<VecDeque<(i64, i64)>>>);

impl Charges {
    /// All at one time.
    pub(super) fn one(time: i64, cost: i64) -> Self {
        Self(Some(Box::new([(time, cost)].into())))
    }

    /// Gives back the newest first. The time of the newest that is left.
    pub(super) fn give_back(&mut self, mut cost: i64) -> Option<i64> {
        while cost > 0
            && let Some((time, charge)) = self.pop_back()
        {
            if charge > cost {
                self.push_back((time, charge - cost));
            }
            cost -= charge.min(cost);
        }
        self.back().map(|(time, _)| *time)
    }
}

/// None are as many as an empty queue.
impl PartialEq for Charges {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Charges {}

impl Deref for Charges {
    type Target = VecDeque<(i64, i64)>;

    fn deref(&self) -> &Self::Target {
        static NONE: VecDeque<(i64, i64)> = VecDeque::new();
        self.0.as_deref().unwrap_or(&NONE)
    }
}

impl DerefMut for Charges {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.get_or_insert_default()
    }
}
