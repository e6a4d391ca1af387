//! Loops that do nothing but move memory: the limit that the other kernels are measured against.

use super::vectorised;

vectorised! {
    /// `a = a * scale + b`: SGD's mix of reads and writes, 12 bytes an element.
    pub fn triad(a: &mut [f32], b: &[f32], scale: f32) {
        let n = a.len();
        let b = &b[..n];
        for i in 0..n {
            a[i] = a[i] * scale + b[i];
        }
    }
}

vectorised! {
    /// One addition to each of three arrays: AdamW's mix of reads and writes, 28 bytes an element.
    pub fn three_sums(a: &mut [f32], b: &mut [f32], c: &mut [f32], d: &[f32]) {
        let n = a.len();
        let (b, c, d) = (&mut b[..n], &mut c[..n], &d[..n]);
        for i in 0..n {
            a[i] += d[i];
            b[i] += d[i];
            c[i] += d[i];
        }
    }
}
