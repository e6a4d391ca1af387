//! Memory of payloads that have been sent, for the next ones.

use bytes::Bytes;

/// The number of payloads whose memory is kept. One is written while another is sent.
const KEPT: usize = 2;

/// Makes payloads, and uses the memory of an earlier one if it has been dropped. New memory would
/// have to be cleared, and often be mapped: that takes longer than encoding what is in it.
#[derive(Debug, Default)]
pub struct Spare {
    /// The last payloads, oldest first.
    made: Vec<Bytes>,
}

impl Spare {
    /// Returns a payload of `len` bytes, all of which `write` writes. They are not cleared.
    pub fn payload(&mut self, len: usize, write: impl FnOnce(&mut [u8])) -> Bytes {
        let dropped = self.made.iter().position(Bytes::is_unique);
        let full = (self.made.len() == KEPT).then_some(0);
        let earlier = dropped.or(full).map(|at| self.made.remove(at));
        let mut bytes = earlier.and_then(|of| of.try_into_mut().ok()).unwrap_or_default();
        bytes.resize(len, 0);
        write(&mut bytes);
        let payload = bytes.freeze();
        self.made.push(payload.clone());
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_only_when_its_payload_is_dropped() {
        let mut spare = Spare::default();
        let mut made = |value: u8, len| spare.payload(len, |bytes| bytes.fill(value));
        let [first, second] = [made(1, 100_000), made(2, 100_000)];
        let third = made(3, 100_000);
        assert!([&first, &second].iter().all(|of| of.as_ptr() != third.as_ptr()));
        assert_eq!([first[99_999], second[99_999]], [1, 2]);
        let address = second.as_ptr();
        drop(second);
        // Also if the next one is shorter, or longer.
        let fourth = made(4, 10);
        assert_eq!((fourth.as_ptr(), &fourth[..]), (address, &[4; 10][..]));
        assert_eq!(third, [3; 100_000].as_slice());
        drop(third);
        assert_eq!(made(5, 100_001), [5; 100_001].as_slice());
        assert_eq!(fourth, [4; 10].as_slice());
    }

    #[test]
    fn one_payload_at_a_time_needs_one_memory() {
        let mut spare = Spare::default();
        let address = spare.payload(1000, |bytes| bytes.fill(1)).as_ptr();
        for value in 2..9 {
            assert_eq!(spare.payload(1000, |bytes| bytes.fill(value)).as_ptr(), address);
        }
    }
}
