//! Enums as text: one word per variant.

/// Implements `Display`, `FromStr` and serde's traits for an enum without data, given a word per
/// variant.
macro_rules! words {
    (@choices $word:literal, $last:literal) => {
        concat!("`", $word, "` or `", $last, "`")
    };
    (@choices $word:literal, $($rest:literal),+) => {
        concat!("`", $word, "`, ", $crate::limit::words!(@choices $($rest),+))
    };
    ($type:ident, $what:literal: $($variant:ident = $word:literal),+ $(,)?) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $word,)+
                })
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::ConfigError;

            /// # Errors
            ///
            /// Returns an error for any other word.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text.trim() {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($crate::error::ConfigError::choice(
                        $what,
                        text,
                        $crate::limit::words!(@choices $($word),+),
                    )),
                }
            }
        }

        #[cfg(feature = "serde")]
        $crate::limit::formats::text!($type, $crate::limit::words!(@choices $($word),+));
    };
}

pub(crate) use words;
