//! Writes and reads bits, starting with the lowest bit of each byte.

/// Appends bits to bytes.
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    /// The bits that are not in `out` yet. The first one is the lowest.
    pending: u64,
    /// The number of pending bits. INVARIANT: less than 32.
    count: u32,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, pending: 0, count: 0 }
    }

    /// Appends the lowest `count` bits of `value`, at most 32. The other bits of `value` are 0.
    #[inline]
    pub(crate) fn write(&mut self, value: u32, count: u32) {
        self.pending |= u64::from(value) << self.count;
        self.count += count;
        if self.count >= 32 {
            self.out.extend_from_slice(&(self.pending as u32).to_le_bytes());
            self.pending >>= 32;
            self.count -= 32;
        }
    }

    /// Appends `zeros` zeros, and a one.
    #[inline]
    pub(crate) fn unary(&mut self, mut zeros: u32) {
        while zeros >= 31 {
            self.write(0, 31);
            zeros -= 31;
        }
        self.write(1 << zeros, zeros + 1);
    }

    /// Fills the last byte with zeros.
    pub(crate) fn finish(self) {
        let bytes = self.count.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.pending.to_le_bytes()[..bytes]);
    }
}

/// Reads bits from bytes, and zeros after the last byte. [`Reader::end`] tells whether it has read
/// past the end.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    /// The position of the first byte that is not counted in `ready`.
    at: usize,
    /// The next bits, the first one lowest.
    bits: u64,
    /// The number of bits in `bits` that belong to the bytes before `at`. `bits` may have more.
    ready: u32,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, bits: 0, ready: 0 }
    }

    /// Returns the next bits, without consuming them: at least 56 until [`Self::skip`].
    #[inline(always)]
    pub(crate) fn peek(&mut self) -> u64 {
        let word = match self.bytes.get(self.at..self.at + 8) {
            Some(word) => u64::from_le_bytes(word.try_into().expect("eight bytes")),
            None => last_word(self.bytes, self.at),
        };
        // Bits beyond `ready` are those of `word`, too, so they may be there already.
        self.bits |= word << self.ready;
        self.at += ((63 - self.ready) / 8) as usize;
        self.ready |= 56;
        self.bits
    }

    /// Consumes bits that [`Self::peek`] has returned, at most 56 for each call of it.
    #[inline(always)]
    pub(crate) fn skip(&mut self, count: u32) {
        self.bits >>= count;
        self.ready -= count;
    }

    /// Reads the next `count` bits, at most 32.
    #[inline(always)]
    pub(crate) fn read(&mut self, count: u32) -> u32 {
        let value = self.peek() & ((1 << count) - 1);
        self.skip(count);
        value as u32
    }

    /// Reads zeros up to the next one, and the one. Returns the number of zeros, or `None` if there
    /// are more than `most`.
    #[inline(always)]
    pub(crate) fn unary(&mut self, most: u32) -> Option<u32> {
        let mut zeros = 0;
        loop {
            let next = self.peek().trailing_zeros();
            if next < 56 {
                self.skip(next + 1);
                zeros += next;
                return (zeros <= most).then_some(zeros);
            }
            self.skip(56);
            zeros += 56;
            if zeros > most {
                return None;
            }
        }
    }

    /// Returns how many bytes the bits were read from, or `None` if there were fewer.
    pub(crate) fn end(&self) -> Option<usize> {
        let bytes = (8 * self.at - self.ready as usize).div_ceil(8);
        (bytes <= self.bytes.len()).then_some(bytes)
    }
}

/// Returns the bytes from `at` on, fewer than eight, and zeros.
#[cold]
#[inline(never)]
fn last_word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    let rest = bytes.get(at..).unwrap_or_default();
    word[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(word)
}
