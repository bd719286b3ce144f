package executor_test

import (
	"testing"
)

// An executor has a stream to a warm runner while another executor runs a turn of the session, and the end of the
// stream does not arrive. The executor can run the next query all the same: the lines that it missed are in the log,
// and the runner has removed them.
func TestStaleStream_RunsTheNextQuery(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	first := b.run()
	s := b.session()
	s.ended(s.post("one"))
	fake := b.provider.only().runner
	fake.lag(true)
	first.wire.freeze()
	second := b.run()
	s.ended(s.post("two"))
	if err := second.stop(); err != nil {
		t.Fatal(err)
	}
	first.wire.thaw()
	x := s.post("three")
	b.until("the first executor has it", func() bool { return s.load().Run.Execution == x })
	fake.lag(false)
	s.ended(x)
	if asked := fake.asked(); len(asked) != 3 {
		t.Errorf("the runner was given %d queries", len(asked))
	}
	b.noJobs()
}
