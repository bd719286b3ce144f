package server

import "sync"

// maxCounted is the largest number of keys of counts; the oldest keys are dropped first.
const maxCounted = 4096

// counts counts what cannot be derived from a conversation: how often a rule with a limit was used, and how often the
// same request came.
type counts struct {
	mu    sync.Mutex
	used  map[string]int
	order []string
}

// countUse counts one more use of key and returns how many there were before.
func (c *counts) countUse(key string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.add(key)
}

// useRule reports whether the rule may be used once more, and counts the use.
func (c *counts) useRule(r *rule, conversation *Conversation) bool {
	if r.times == 0 {
		return true
	}
	key := "rule\x00" + r.name
	if r.each {
		key += "\x00" + conversation.identity()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used[key] >= r.times {
		return false
	}
	c.add(key)
	return true
}

// add counts a use of key and returns how many there were before. The caller must hold the lock.
func (c *counts) add(key string) int {
	if c.used == nil {
		c.used = map[string]int{}
	}
	before, known := c.used[key]
	if !known {
		c.order = append(c.order, key)
		if len(c.order) > maxCounted {
			delete(c.used, c.order[0])
			c.order = c.order[1:]
		}
	}
	c.used[key] = before + 1
	return before
}
