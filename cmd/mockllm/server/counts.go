package server

import "sync"

// maxCountedKeys is the maximum number of keys that useCounts holds. When there are more, it drops the oldest.
const maxCountedKeys = 4096

// useCounts holds the only state that answers depend on besides the conversation: how often a rule with a limit was
// used, and how often the same request was received.
type useCounts struct {
	mu    sync.Mutex
	used  map[string]int
	order []string
}

// countKey increments the count of key and returns the count before.
func (c *useCounts) countKey(key string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.increment(key)
}

// tryUseRule reports whether the rule's limit allows one more use for the conversation, and counts the use if so.
func (c *useCounts) tryUseRule(r *scriptRule, conversation *Conversation) bool {
	if r.times == 0 {
		return true
	}
	key := "rule\x00" + r.name
	if r.each {
		key += "\x00" + conversation.stableID()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used[key] >= r.times {
		return false
	}
	c.increment(key)
	return true
}

// increment increments the count of key and returns the count before. The caller must hold the lock.
func (c *useCounts) increment(key string) int {
	if c.used == nil {
		c.used = map[string]int{}
	}
	before, known := c.used[key]
	if !known {
		c.order = append(c.order, key)
		if len(c.order) > maxCountedKeys {
			delete(c.used, c.order[0])
			c.order = c.order[1:]
		}
	}
	c.used[key] = before + 1
	return before
}
