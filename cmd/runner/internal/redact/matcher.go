package redact

import "slices"

// patternMatcher is an Aho-Corasick automaton that finds patterns in a text. Its state after each byte is the longest
// suffix of the text that is a prefix of a pattern.
type patternMatcher struct {
	nodes []matcherState
	first [256]int32 // the root's edges; 0 for none
}

// matcherState is a state of a patternMatcher.
type matcherState struct {
	edges   []matcherEdge // none in the root, see matcher.first
	fail    int32         // the longest proper suffix of this state that is a state
	longest int32         // length in bytes of the longest pattern that ends here, 0 for none
	open    int32         // length in bytes of the longest suffix of this state that more bytes can make a pattern
}

// matcherEdge is a transition of a patternMatcher by one byte.
type matcherEdge struct {
	to int32
	b  byte
}

// newPatternMatcher returns a patternMatcher for the patterns.
func newPatternMatcher(patterns []string) *patternMatcher {
	m := &patternMatcher{nodes: make([]matcherState, 1)}
	for _, p := range patterns {
		at := int32(0)
		for i := range len(p) {
			to, ok := m.childState(at, p[i])
			if !ok {
				to = int32(len(m.nodes)) //nolint:gosec // the values come in one line of the protocol
				m.nodes = append(m.nodes, matcherState{})
				if at == 0 {
					m.first[p[i]] = to
				} else {
					m.nodes[at].edges = append(m.nodes[at].edges, matcherEdge{to, p[i]})
					m.nodes[at].open = int32(i) //nolint:gosec // likewise
				}
			}
			at = to
		}
		m.nodes[at].longest = int32(len(p)) //nolint:gosec // likewise
	}
	m.setFailEdges()
	return m
}

// setFailEdges sets the fail edge of each state, the transition if no other one matches, for shorter states first.
func (m *patternMatcher) setFailEdges() {
	var queue []int32
	for _, to := range m.first {
		if to != 0 {
			queue = append(queue, to)
		}
	}
	for len(queue) > 0 {
		at := queue[0]
		queue = queue[1:]
		n := &m.nodes[at]
		n.longest = max(n.longest, m.nodes[n.fail].longest)
		n.open = max(n.open, m.nodes[n.fail].open)
		for _, e := range n.edges {
			m.nodes[e.to].fail = m.nextState(n.fail, e.b)
			queue = append(queue, e.to)
		}
	}
}

// childState returns the state for the text of the state at with one more byte b, and false if no pattern begins with
// that text.
func (m *patternMatcher) childState(at int32, b byte) (int32, bool) {
	if at == 0 {
		return m.first[b], m.first[b] != 0
	}
	edges := m.nodes[at].edges
	i := slices.IndexFunc(edges, func(e matcherEdge) bool { return e.b == b })
	if i < 0 {
		return 0, false
	}
	return edges[i].to, true
}

// nextState returns the state that follows the state at after the byte b of the text.
func (m *patternMatcher) nextState(at int32, b byte) int32 {
	for {
		to, ok := m.childState(at, b)
		if ok || at == 0 {
			return to
		}
		at = m.nodes[at].fail
	}
}
