use std::num::NonZeroU32;
use std::sync::Mutex;

use crate::limit::Policies;
use crate::store::{Instances, lock};

/// How many instances share a policy while each decides by itself.
///
/// Each grants the whole part of a limit and of a burst, at least 1: with more instances than the limit, all together
/// may grant one each. The rate of a strategy that refills little by little is divided exactly.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Share {
    /// So many.
    Fixed(NonZeroU32),
    /// As many as were alive when Redis was last seen.
    Alive(Instances),
}

impl Share {
    /// So many instances; 0 counts as 1.
    pub const fn fixed(instances: u32) -> Self {
        match NonZeroU32::new(instances) {
            Some(instances) => Self::Fixed(instances),
            None => Self::Fixed(NonZeroU32::MIN),
        }
    }

    pub(super) fn instances(&self) -> NonZeroU32 {
        match self {
            Self::Fixed(instances) => *instances,
            Self::Alive(instances) => instances.alive(),
        }
    }
}

/// The parts of the policies that have been asked for, so that each is made once.
#[derive(Debug, Default)]
pub(super) struct Parts(Mutex<Vec<(Policies, NonZeroU32, Policies)>>);

impl Parts {
    /// Policies that are made anew for every request are not worth more.
    const MOST: usize = 64;

    pub(super) fn of(&self, policies: &Policies, instances: NonZeroU32) -> Policies {
        let mut parts = lock(&self.0);
        if let Some((.., part)) = parts.iter().find(|(whole, of, _)| whole.is(policies) && *of == instances) {
            return part.clone();
        }
        if parts.len() >= Self::MOST {
            parts.clear();
        }
        let part = policies.share(instances);
        parts.push((policies.clone(), instances, part.clone()));
        part
    }
}
