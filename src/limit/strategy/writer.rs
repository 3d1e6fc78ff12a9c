//! The quota that wrote the level of a meter, as the value names it.

use smallvec::SmallVec;

/// A quota in the numbers of a meter, packed: most fit one integer of 8 bytes, so that two quotas are compared as fast as two
/// numbers.
///
/// ```text
/// short:  interval, ticks and capacity in 7 bytes; a byte with 8 * the bytes of the interval + those of the ticks
/// long:   interval in 6 bytes; two zero bytes; `rest`: ticks and capacity in 4 bytes each
/// ```
///
/// All numbers have their least significant byte first. Lua reads the first 8 bytes as a double to compare them: that is
/// never NaN, since the last byte is below 0x7f. A meter that drains after each period has an interval of 1, and
/// stores the period instead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Writer {
    pub(crate) code: u64,
    /// 0 for a short one.
    pub(crate) rest: u64,
}

const SHORT_BYTES: u32 = 7;

impl Writer {
    /// `interval` is below 2^48, the others are below 2^32. None is 0.
    pub(crate) fn new(interval: i64, ticks: i64, capacity: i64) -> Self {
        let [interval, ticks, capacity] = [interval, ticks, capacity].map(|number| number as u64);
        let first = bytes_of(interval);
        let second = bytes_of(ticks);
        if first + second + bytes_of(capacity) <= SHORT_BYTES {
            let tag = u64::from(8 * first + second) << 56;
            let numbers = interval | ticks << (8 * first) | capacity << (8 * (first + second));
            return Self {
                code: tag | numbers,
                rest: 0,
            };
        }
        Self {
            code: interval,
            rest: ticks | capacity << 32,
        }
    }

    /// Returns the interval, the ticks and the capacity. `None` if no quota has this code.
    pub(crate) fn numbers(self) -> Option<[i64; 3]> {
        let tag = (self.code >> 56) as u32;
        let numbers = if tag == 0 {
            [self.code, self.rest & u64::from(u32::MAX), self.rest >> 32]
        } else {
            let first = tag / 8;
            let second = tag % 8;
            if first == 0 || second == 0 || first + second >= SHORT_BYTES {
                return None;
            }
            let third = SHORT_BYTES - first - second;
            let number = |from: u32, bytes: u32| self.code >> (8 * from) & ((1 << (8 * bytes)) - 1);
            [
                number(0, first),
                number(first, second),
                number(first + second, third),
            ]
        };
        if numbers.contains(&0) {
            return None;
        }
        Some(numbers.map(|number| number as i64))
    }

    /// Returns the bytes in Redis: 8 for a short one, 16 for a long one, and none for none.
    pub(crate) fn to_bytes(self) -> SmallVec<[u8; 16]> {
        let mut bytes = SmallVec::new();
        for number in [self.code, self.rest] {
            if number != 0 {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
        bytes
    }
}

fn bytes_of(number: u64) -> u32 {
    (u64::BITS - number.leading_zeros()).div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_packing() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut short = 0;
        for _ in 0..100_000 {
            let mut number = |bits| {
                let bits = rng.u32(0..bits);
                1 + rng.i64(0..1 << bits)
            };
            let (interval, ticks, capacity) = (number(46), number(32), number(32));
            let writer = Writer::new(interval, ticks, capacity);
            assert_eq!(writer.numbers(), Some([interval, ticks, capacity]));
            assert!(!f64::from_bits(writer.code).is_nan());
            short += u32::from(writer.rest == 0);
        }
        assert!((10_000..90_000).contains(&short), "{short}");
        assert_eq!(Writer::default().numbers(), None);
        for _ in 0..10_000 {
            let _ = Writer {
                code: rng.u64(..),
                rest: rng.u64(..),
            }
            .numbers();
        }
    }
}
