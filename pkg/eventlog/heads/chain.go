package heads

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Fault is a position in a chain of signed heads, or in the log, whose content differs from what was signed.
type Fault struct {
	Subject string // of the chain or of the log
	Seq     uint64 // stream sequence, in the chain or in the log
	Why     string
}

// Chain holds the signed heads of one shard. Create it with NewChain.
type Chain struct {
	shard   int
	n       uint64
	hash    string
	last    time.Time // time of the last entry
	through uint64
	at      time.Time // time of the entry that stated through
	ranges  []coveredRange
	heads   map[uint64]signedHead // by stream sequence in the log
	faults  []Fault
}

// coveredRange is a range of stream sequences of the log for which one entry lists the last commit of every changed
// subject.
type coveredRange struct {
	through uint64
	n       uint64
	last    map[string]uint64 // sequence of the last commit, by subject
}

// signedHead is one of the heads that an entry lists, with the number and the time of the entry.
type signedHead struct {
	Head
	n    uint64
	time time.Time
}

// NewChain returns the empty chain of a shard.
func NewChain(shard int) *Chain {
	return &Chain{shard: shard, heads: map[uint64]signedHead{}}
}

// FaultSubject returns the name of a shard's chain of signed heads in a Fault.
func FaultSubject(shard int) string { return "head." + strconv.Itoa(shard) }

// Add adds the next stored entry of the shard. seq is its sequence in the stream of heads. An invalid entry becomes
// a fault of the chain, and the chain continues after it. Add returns an error if no key matches.
func (c *Chain) Add(seq uint64, stored []byte, keys ...PublicKey) error {
	e, hash, err := OpenEntry(stored, keys...)
	var unknown *UnknownKeyError
	if errors.As(err, &unknown) {
		return fmt.Errorf("entry at sequence %d of %s: %w", seq, FaultSubject(c.shard), err)
	}
	fault := ""
	switch {
	case err != nil:
		fault = err.Error()
	case e.Shard != c.shard:
		fault = fmt.Sprintf("is an entry of shard %d", e.Shard)
	case e.N != c.n+1:
		fault = fmt.Sprintf("has number %d instead of %d: entries before it were removed or stored twice", e.N, c.n+1)
	case e.Prev != c.hash:
		fault = "does not link to the previous entry"
	case e.Through < c.through:
		fault = fmt.Sprintf("covers the log up to %d, but an earlier entry covers it up to %d", e.Through, c.through)
	}
	if fault != "" {
		c.faults = append(c.faults, Fault{FaultSubject(c.shard), seq, fault})
	}
	if err == nil {
		c.addVerified(e, hash)
	}
	return nil
}

// addVerified adds the heads and the covered range of an entry whose signature was verified. hash is the hash of the
// entry's bytes.
func (c *Chain) addVerified(e ChainEntry, hash string) {
	c.n, c.hash, c.last = e.N, hash, e.Time
	for _, h := range e.Heads {
		c.heads[h.Seq] = signedHead{h, e.N, e.Time}
	}
	if e.Through <= c.through {
		return
	}
	w := coveredRange{through: e.Through, n: e.N, last: make(map[string]uint64, len(e.Heads))}
	for _, h := range e.Heads {
		w.last[h.Subject] = h.Seq
	}
	c.ranges = append(c.ranges, w)
	c.through, c.at = e.Through, e.Time
}

// Shard returns the number of the shard.
func (c *Chain) Shard() int { return c.shard }

// LastEntry returns the number, the hash and the time of the last entry of the chain. The number is 0 if there is none.
// A copy that is kept elsewhere proves later that the chain was not truncated before this entry.
func (c *Chain) LastEntry() (n uint64, hash string, at time.Time) { return c.n, c.hash, c.last }

// ProvedThrough returns the stream sequence up to which the entries list every change of the log, and the time of the
// entry that states it. Later changes are not covered.
func (c *Chain) ProvedThrough() (through uint64, at time.Time) { return c.through, c.at }

// Compare begins a comparison of the shard's commits with the chain. covers reports whether the commits of a subject
// will be added; nil means all.
func (c *Chain) Compare(covers func(subject string) bool) *Comparison {
	return &Comparison{chain: c, covers: covers, seen: map[uint64]bool{}, good: map[string]uint64{}, present: map[string]uint64{}}
}

// Comparison compares the commits of one shard of the log with the chain of signed heads. Commits must be added in
// order.
type Comparison struct {
	chain   *Chain
	covers  func(subject string) bool // reports whether commits of a subject are added; nil means all
	seen    map[uint64]bool           // sequences of the signed heads that were found
	good    map[string]uint64         // by subject: the last sequence whose signed hash matches
	current int
	present map[string]uint64 // by subject: its last commit in the current range
}

// Add compares a commit with the chain. It returns the problem of the commit, or "", and the faults of the covered
// ranges that end before the commit.
func (k *Comparison) Add(subject string, seq uint64, hash string) (why string, before []Fault) {
	before = k.endRangesBefore(seq)
	if k.current < len(k.chain.ranges) {
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
		return fmt.Sprintf("belongs to another subject than %s, which entry %d of the signed heads lists at this sequence", h.Subject, h.n), before
	}
	return fmt.Sprintf("does not have the hash that was signed at %s (entry %d of the signed heads): this commit, or a commit of the subject after sequence %d, was altered",
		h.time.UTC().Format(time.RFC3339), h.n, k.good[subject]), before
}

// AddUnreadable records the sequence of a commit that exists but cannot be read.
func (k *Comparison) AddUnreadable(seq uint64) { k.seen[seq] = true }

// endRangesBefore ends the covered ranges that precede a sequence and returns their faults.
func (k *Comparison) endRangesBefore(seq uint64) []Fault {
	var faults []Fault
	for k.current < len(k.chain.ranges) && seq > k.chain.ranges[k.current].through {
		w := k.chain.ranges[k.current]
		for subject, last := range k.present {
			if listed := w.last[subject]; listed < last {
				faults = append(faults, Fault{subject, last, fmt.Sprintf("did not exist when entry %d of the signed heads was written, which covers the log up to %d", w.n, w.through)})
			}
		}
		clear(k.present)
		k.current++
	}
	return faults
}

// Finish returns the faults that are known after all commits were added: the faults of the last covered ranges, and the
// signed heads whose commit is missing. The janitor may have removed a missing commit of a deleted session.
func (k *Comparison) Finish() (faults, missing []Fault) {
	faults = k.endRangesBefore(^uint64(0))
	for seq, h := range k.chain.heads {
		if !k.seen[seq] && (k.covers == nil || k.covers(h.Subject)) {
			missing = append(missing, Fault{h.Subject, seq, fmt.Sprintf("is missing: its hash was signed at %s (entry %d of the signed heads)", h.time.UTC().Format(time.RFC3339), h.n)})
		}
	}
	return faults, missing
}

// Faults returns the faults of the entries of the chain.
func (c *Chain) Faults() []Fault { return c.faults }
