package heads

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Fault is a place of a chain of signed heads, or of the log, that does not fit what was signed.
type Fault struct {
	Subject string // of the chain, or of the log
	Seq     uint64 // stream sequence, in the chain or in the log
	Why     string
}

// Chain holds the signed heads of one shard. The zero Chain is empty.
type Chain struct {
	shard   int
	n       uint64
	hash    string
	last    time.Time // of the last entry
	through uint64
	at      time.Time // of the entry that stated through
	windows []window
	heads   map[uint64]signedHead // by stream sequence of the log
	faults  []Fault
}

// window is a range of stream sequences of which an entry lists every subject's last commit.
type window struct {
	through uint64
	n       uint64
	last    map[string]uint64 // by subject
}

type signedHead struct {
	Head
	n    uint64
	time time.Time
}

// NewChain returns the empty chain of a shard.
func NewChain(shard int) *Chain {
	return &Chain{shard: shard, heads: map[uint64]signedHead{}}
}

// Subject names a shard's chain in faults.
func Subject(shard int) string { return "head." + strconv.Itoa(shard) }

// Add takes the next stored entry of the shard; seq is its sequence in the stream of heads. What is wrong with the entry is a fault of the
// chain, and the chain goes on after it. An error means that no key fits.
func (c *Chain) Add(seq uint64, stored []byte, keys ...PublicKey) error {
	e, hash, err := Open(stored, keys...)
	var unknown *UnknownKeyError
	if errors.As(err, &unknown) {
		return fmt.Errorf("entry at sequence %d of %s: %w", seq, Subject(c.shard), err)
	}
	fault := ""
	switch {
	case err != nil:
		fault = err.Error()
	case e.Shard != c.shard:
		fault = fmt.Sprintf("is an entry of shard %d", e.Shard)
	case e.N != c.n+1:
		fault = fmt.Sprintf("has number %d, and %d is due: entries before it were removed, or stored again", e.N, c.n+1)
	case e.Prev != c.hash:
		fault = "does not cover the entry before it"
	case e.Through < c.through:
		fault = fmt.Sprintf("covers the log up to %d, and an entry before it up to %d", e.Through, c.through)
	}
	if fault != "" {
		c.faults = append(c.faults, Fault{Subject(c.shard), seq, fault})
	}
	if err == nil {
		c.take(e, hash)
	}
	return nil
}

func (c *Chain) take(e Entry, hash string) {
	c.n, c.hash, c.last = e.N, hash, e.Time
	for _, h := range e.Heads {
		c.heads[h.Seq] = signedHead{h, e.N, e.Time}
	}
	if e.Through <= c.through {
		return
	}
	w := window{through: e.Through, n: e.N, last: make(map[string]uint64, len(e.Heads))}
	for _, h := range e.Heads {
		w.last[h.Subject] = h.Seq
	}
	c.windows = append(c.windows, w)
	c.through, c.at = e.Through, e.Time
}

// Shard returns the number of the shard.
func (c *Chain) Shard() int { return c.shard }

// Last returns the number, the hash and the time of the last entry; the number is 0 for none. Whoever keeps them elsewhere can tell later
// that the chain was not cut before this entry.
func (c *Chain) Last() (n uint64, hash string, at time.Time) { return c.n, c.hash, c.last }

// Proved is the sequence up to which the entries list every change of the log, and when that was signed. Nothing says what came later.
func (c *Chain) Proved() (through uint64, at time.Time) { return c.through, c.at }

// Check compares the commits of a shard, which are added in order, with the chain.
func (c *Chain) Check(covers func(subject string) bool) *Check {
	return &Check{chain: c, covers: covers, seen: map[uint64]bool{}, good: map[string]uint64{}, present: map[string]uint64{}}
}

// Check is one comparison of a shard of the log with its chain.
type Check struct {
	chain   *Chain
	covers  func(subject string) bool // reports whether commits of a subject are added; nil for all
	seen    map[uint64]bool           // signed heads that were found
	good    map[string]uint64         // by subject: the last sequence whose signed hash fits
	window  int
	present map[string]uint64 // by subject: its last commit in the present window
}

// Add compares a commit and returns what is wrong with it, "" for nothing, and with the commits of the windows that end before it.
func (k *Check) Add(subject string, seq uint64, hash string) (why string, before []Fault) {
	before = k.advance(seq)
	if k.window < len(k.chain.windows) {
		k.present[subject] = seq
	}
	h, ok := k.chain.heads[seq]
	if !ok {
		return "", before
	}
	k.seen[seq] = true
	if h.Subject == subject && h.Hash == hash {
		k.good[subject] = seq
		return "", before
	}
	if h.Subject != subject {
		return fmt.Sprintf("is a commit of another subject than %s, which entry %d of the signed heads lists here", h.Subject, h.n), before
	}
	return fmt.Sprintf("has not the hash that was signed at %s (entry %d of the signed heads): it, or a commit of the subject after sequence %d, was altered",
		h.time.UTC().Format(time.RFC3339), h.n, k.good[subject]), before
}

// Skip notes a commit that is there and cannot be read.
func (k *Check) Skip(seq uint64) { k.seen[seq] = true }

// advance ends the windows that lie before a sequence.
func (k *Check) advance(seq uint64) []Fault {
	var faults []Fault
	for k.window < len(k.chain.windows) && seq > k.chain.windows[k.window].through {
		w := k.chain.windows[k.window]
		for subject, last := range k.present {
			if listed := w.last[subject]; listed < last {
				faults = append(faults, Fault{subject, last, fmt.Sprintf("was not there when entry %d of the signed heads was written, which covers the log up to %d", w.n, w.through)})
			}
		}
		clear(k.present)
		k.window++
	}
	return faults
}

// End returns the faults that are known when all commits have been added: those of the last windows, and the signed heads whose commit is
// missing. A missing commit of a deleted session may have been removed by the janitor.
func (k *Check) End() (faults, missing []Fault) {
	faults = k.advance(^uint64(0))
	for seq, h := range k.chain.heads {
		if !k.seen[seq] && (k.covers == nil || k.covers(h.Subject)) {
			missing = append(missing, Fault{h.Subject, seq, fmt.Sprintf("is missing: its hash was signed at %s (entry %d of the signed heads)", h.time.UTC().Format(time.RFC3339), h.n)})
		}
	}
	return faults, missing
}

// Faults are what is wrong with the chain itself.
func (c *Chain) Faults() []Fault { return c.faults }
