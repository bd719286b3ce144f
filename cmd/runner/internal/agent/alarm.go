package agent

import "time"

// alarm is a function of a turn that is called at a time.
type alarm struct {
	timer *time.Timer
	call  func()
}

// SetAlarm makes the turn's caller call f after d, in the goroutine that passes the agent's lines, unless the turn has ended. It replaces an earlier
// alarm; a nil f only removes it. Between turns SetAlarm does nothing.
func (t *Turn) SetAlarm(d time.Duration, f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.alarm.timer != nil {
		t.alarm.timer.Stop()
	}
	t.alarm = alarm{}
	if f != nil && t.end == nil && !t.idle {
		t.alarm = alarm{time.NewTimer(d), f}
	}
}

// Alarm returns a channel that receives when RunAlarm is due, or nil if no alarm is set. The channel is valid until the next call of SetAlarm.
func (t *Turn) Alarm() <-chan time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.alarm.timer == nil {
		return nil
	}
	return t.alarm.timer.C
}

// RunAlarm removes the alarm and calls its function.
func (t *Turn) RunAlarm() {
	t.mu.Lock()
	call := t.alarm.call
	t.alarm = alarm{}
	t.mu.Unlock()
	if call != nil {
		call()
	}
}

// AnswerTimeout returns how long an agent may take to answer a request that it answers without its model.
func (t *Turn) AnswerTimeout() time.Duration { return t.cfg.AnswerTimeout }
