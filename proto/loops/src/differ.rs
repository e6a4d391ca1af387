//! Finds the elements in which two arrays differ.

use crate::vectorised;

/// The number of elements per mask.
pub const GROUP: usize = 16;

vectorised! {
    /// Compares elements of 2 bytes, and writes a mask for each [`GROUP`] of them. Sets bit `i` if
    /// element `i` of the group differs. Ignores an incomplete last group.
    pub fn differ16(before: &[u8], after: &[u8], masks: &mut [u16]) {
        let (before, after) = (before.as_chunks::<32>().0, after.as_chunks::<32>().0);
        for ((before, after), mask) in before.iter().zip(after).zip(masks) {
            let mut found = 0;
            for i in 0..GROUP {
                let [b, a] = [before, after].map(|of| u16::from_le_bytes([of[2 * i], of[2 * i + 1]]));
                found |= if a == b { 0 } else { 1 << i };
            }
            *mask = found;
        }
    }
}

vectorised! {
    /// Compares elements of 4 bytes, like [`differ16`].
    pub fn differ32(before: &[u8], after: &[u8], masks: &mut [u16]) {
        let (before, after) = (before.as_chunks::<64>().0, after.as_chunks::<64>().0);
        for ((before, after), mask) in before.iter().zip(after).zip(masks) {
            let mut found = 0u32;
            for i in 0..GROUP {
                let at = |of: &[u8; 64]| {
                    u32::from_le_bytes([of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]])
                };
                found |= if at(before) == at(after) { 0 } else { 1 << i };
            }
            *mask = found as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn every_level_finds_the_elements_that_differ() {
        let before: Vec<u8> = (0..4 * 16 * 9).map(|i| (i * 7) as u8).collect();
        for level in Level::all() {
            for (size, differ) in
                [(2, differ16 as fn(Level, &[u8], &[u8], &mut [u16])), (4, differ32)]
            {
                let groups = before.len() / size / GROUP;
                let mut masks = vec![u16::MAX; groups];
                differ(level, &before, &before, &mut masks);
                assert!(masks.iter().all(|&mask| mask == 0));
                for byte in 0..before.len() {
                    let mut after = before.clone();
                    after[byte] ^= 0x10;
                    differ(level, &before, &after, &mut masks);
                    let element = byte / size;
                    for (group, &mask) in masks.iter().enumerate() {
                        let is_here = group == element / GROUP;
                        assert_eq!(mask, if is_here { 1 << (element % GROUP) } else { 0 });
                    }
                }
            }
        }
    }
}
