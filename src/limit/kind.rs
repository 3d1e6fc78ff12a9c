use std::fmt;
use std::str::FromStr;

use super::Strategy;
use super::strategy::Frees;
use crate::error::ConfigError;

/// What a policy bounds. What differs between the two is asked here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// How much is charged over time.
    Rate(Strategy),
    /// How many requests run at the same moment.
    InFlight,
}

impl Kind {
    /// The letter that stands for it in a key.
    pub(crate) const fn letter(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.letter(),
            Self::InFlight => "s",
        }
    }

    /// The name as text, without a parameter.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.name(),
            Self::InFlight => IN_FLIGHT,
        }
    }

    /// The kind with this letter in a key, without its parameters.
    pub(super) fn of_letter(letter: &str) -> Option<Self> {
        let strategies = Strategy::ALL.iter().map(|strategy| Self::Rate(*strategy));
        strategies
            .chain([Self::InFlight])
            .find(|kind| kind.letter() == letter)
    }

    /// How what it counts comes free again.
    pub(super) fn frees(self) -> Frees {
        match self {
            Self::Rate(strategy) => strategy.frees(),
            Self::InFlight => Frees::OnRelease,
        }
    }
}

/// The strategy of a policy that names none.
impl Default for Kind {
    fn default() -> Self {
        Self::Rate(Strategy::default())
    }
}

impl From<Strategy> for Kind {
    fn from(strategy: Strategy) -> Self {
        Self::Rate(strategy)
    }
}

/// As the text of a policy says it.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(strategy) => strategy.fmt(f),
            Self::InFlight => f.write_str(IN_FLIGHT),
        }
    }
}

impl FromStr for Kind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim() == IN_FLIGHT {
            Ok(Self::InFlight)
        } else {
            text.parse().map(Self::Rate)
        }
    }
}

const IN_FLIGHT: &str = "in-flight";
