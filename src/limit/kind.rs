use std::fmt;
use std::str::FromStr;

use super::Strategy;
use super::strategy::Frees;
use crate::error::ConfigError;

/// The kind of limit of a policy: a rate, or concurrent requests. All differences between the two
/// start here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Limits the cost over time.
    Rate(Strategy),
    /// Limits concurrent requests.
    InFlight,
}

impl Kind {
    /// Returns the letter of the kind in Redis keys.
    pub(crate) const fn letter(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.letter(),
            Self::InFlight => "s",
        }
    }

    /// Returns the name as text, without a parameter.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Rate(strategy) => strategy.name(),
            Self::InFlight => IN_FLIGHT,
        }
    }

    /// Returns the kind with this letter in Redis keys, with default parameters.
    pub(super) fn of_letter(letter: &str) -> Option<Self> {
        let strategies = Strategy::ALL.iter().map(|strategy| Self::Rate(*strategy));
        strategies
            .chain([Self::InFlight])
            .find(|kind| kind.letter() == letter)
    }

    /// Returns how the policy's capacity is freed.
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

/// The text form in a policy's table.
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
