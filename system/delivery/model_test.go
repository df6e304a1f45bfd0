package delivery

// The model is the table of the package comment as pure functions. It is
// compared with the SQL in differential_test.go and searched in search_test.go.
// Time is reduced to the facts that the statements ask for: is the row due, is
// the lease over, is it past its expiry.

// modelRow is what the statements see of a row.
type modelRow struct {
	status    modelStatus
	attempts  uint8
	limit     uint8
	token     uint8
	unsettled uint8
	deaths    uint8 // stands for version: rises when the row becomes DEAD
	cancel    bool  // cancel_requested
	late      bool  // late_accepted
	due       bool  // W: next_attempt_at and send_after have passed
	over      bool  // SENDING: the lease is over
	old       bool  // past expires_at
	stamped   bool  // dlq_published_at is set
	sms       bool  // a channel without a sender
	stopped   bool  // its campaign was stopped
}

type modelStatus uint8

const (
	absent modelStatus = iota
	mPending
	mSending
	mSent
	mFailed
	mUnknown
	mDead
	mCancelled
	mExpired
)

var modelStatusNames = map[modelStatus]Status{
	absent: "absent", mPending: Pending, mSending: Sending, mSent: Sent, mFailed: Failed,
	mUnknown: Unknown, mDead: Dead, mCancelled: Cancelled, mExpired: Expired,
}

func (s modelStatus) waiting() bool { return s == mPending || s == mFailed }

func (s modelStatus) atRest() bool {
	return s == mSent || s == mDead || s == mCancelled || s == mExpired
}

// guard names one condition or effect of the table that can be taken away.
type guard string

// model is the table under one policy, with some guards taken away.
type model struct {
	policy   Policy
	attempts uint8 // the limit of a new row
	off      map[guard]bool
}

func (m model) on(g guard) bool { return !m.off[g] }

func (m model) resendable() bool { return m.policy != Hold }

const (
	gInsertAbsent       guard = "insert: absent"
	gClaimDue           guard = "claim: due"
	gClaimLimit         guard = "claim: attempts < limit"
	gClaimCancel        guard = "claim: no cancel request"
	gClaimFlag          guard = "claim: no late 250 flagged"
	gClaimOld           guard = "claim: not past expires_at"
	gClaimStopped       guard = "claim: campaign not stopped"
	gClaimWaiting       guard = "claim: W, not a settled state"
	gClaimLeaseOver     guard = "claim: lease over"
	gClaimResendable    guard = "claim: resendable"
	gClaimToken         guard = "claim: token +1"
	gClaimUnsettled     guard = "claim: unsettled +1"
	gLateWaiting        guard = "accepted_late: W"
	gLateUnknown        guard = "accepted_late: UNKNOWN"
	gLateFlag           guard = "accepted_late: flag"
	gTransientToken     guard = "transient: own token"
	gTransientSending   guard = "transient: SENDING"
	gTransientUsedUp    guard = "transient: used up"
	gTransientCancel    guard = "transient: cancel requested"
	gTransientFlag      guard = "transient: flagged"
	gPermanentToken     guard = "permanent: own token"
	gPermanentSending   guard = "permanent: SENDING"
	gPermanentFlag      guard = "permanent: flagged"
	gAmbiguousToken     guard = "ambiguous: own token"
	gAmbiguousHold      guard = "ambiguous: hold"
	gAmbiguousUsedUp    guard = "ambiguous: used up"
	gAmbiguousCancel    guard = "ambiguous: cancel requested"
	gAmbiguousFlag      guard = "ambiguous: flagged"
	gAmbiguousUnsettled guard = "ambiguous: unsettled stays"
	gEndUnsettled       guard = "*end*: unsettled > 0"
	gEndCancel          guard = "*end*: cancel requested"
	gEndUnstamped       guard = "*end*: dead letter not stamped"
	gLeaseOverPast      guard = "lease_over: lease over"
	gLeaseOverNobody    guard = "lease_over: not (resendable and sendable)"
	gLeaseOverCancel    guard = "lease_over: cancel requested makes it unclaimable"
	gLeaseOverFlag      guard = "lease_over: SENT if flagged"
	gCancelGeneration   guard = "cancel: generation"
	gCancelTombstone    guard = "cancel: tombstone"
	gCancelUnsettled    guard = "cancel: unsettled 0"
	gCancelSending      guard = "cancel: SENDING only asked for"
	gCancelUnknown      guard = "cancel: UNKNOWN only asked for"
	gCancelSent         guard = "cancel: SENT unchanged"
	gExpireWaiting      guard = "expire: W"
	gExpireUnsettled    guard = "expire: unsettled 0"
	gReplayDead         guard = "replay: DEAD"
	gReplayCancel       guard = "replay: no cancel request"
	gReplayToken        guard = "replay: token kept"
	gReplayLimit        guard = "replay: limit = attempts + N"
	gAbsentUnknown      guard = "proven_absent: UNKNOWN"
	gAbsentToken        guard = "proven_absent: the token that the proof covers"
	gAbsentCancel       guard = "proven_absent: CANCELLED if requested"
	gAbsentLimit        guard = "proven_absent: limit ≥ attempts + 1"
	gAskUnknown         guard = "ask_again: UNKNOWN"
	gAskPolicy          guard = "ask_again: same-key"
	gAskCancel          guard = "ask_again: no cancel request"
	gAskLimit           guard = "ask_again: limit ≥ attempts + 1"
	gAskUnsettled       guard = "ask_again: unsettled kept"
	gStampVersion       guard = "stamp_dlq: version"
)

// insert: absent → PENDING.
func (m model) insert(r modelRow) (modelRow, bool) {
	if r.status != absent && m.on(gInsertAbsent) {
		return r, false
	}
	return modelRow{status: mPending, limit: m.attempts, due: true, old: r.old, sms: r.sms, stopped: r.stopped}, true
}

func (m model) sendable(r modelRow) bool {
	return (r.attempts < r.limit || !m.on(gClaimLimit)) &&
		(!r.cancel || !m.on(gClaimCancel)) &&
		(!r.late || !m.on(gClaimFlag)) &&
		!r.sms &&
		(!r.old || !m.on(gClaimOld)) &&
		(!r.stopped || !m.on(gClaimStopped))
}

// claim: W, due, sendable; or SENDING, lease over, resendable, sendable.
func (m model) claim(r modelRow) (modelRow, bool) {
	first := r.status.waiting() && (r.due || !m.on(gClaimDue)) || r.status.atRest() && !m.on(gClaimWaiting)
	takeover := r.status == mSending && (r.over || !m.on(gClaimLeaseOver)) && (m.resendable() || !m.on(gClaimResendable))
	if !m.sendable(r) || !first && !takeover {
		return r, false
	}
	r.status = mSending
	r.attempts++
	if m.on(gClaimToken) {
		r.token++
	}
	if m.on(gClaimUnsettled) {
		r.unsettled++
	}
	r.over, r.due = false, false
	return r, true
}

// accepted: SENDING, own token → SENT.
func (m model) accepted(r modelRow, token uint8) (modelRow, bool) {
	if r.status != mSending || r.token != token {
		return r, false
	}
	r.status, r.over = mSent, false
	return r, true
}

// acceptedLate: W, UNKNOWN → SENT; SENDING by another → flag.
func (m model) acceptedLate(r modelRow, token uint8) (modelRow, bool) {
	switch {
	case r.status.waiting() && r.token >= token && m.on(gLateWaiting),
		r.status == mUnknown && r.token >= token && m.on(gLateUnknown):
		r.status, r.late, r.due = mSent, false, false
		return r, true
	case r.status == mSending && r.token > token && !r.late && m.on(gLateFlag):
		r.late = true
		return r, true
	}
	return r, false
}

// end is the row's state after its last try.
func (m model) end(r modelRow) modelRow {
	switch {
	case r.unsettled > 0 && m.on(gEndUnsettled):
		r.status = mUnknown
	case r.cancel && m.on(gEndCancel):
		r.status = mCancelled
	default:
		r.status = mDead
		r.deaths++
	}
	return r
}

// settles reports whether a settle may apply, and prepares the row for it: it
// is held no longer.
func (m model) settles(r modelRow, token uint8, own, sending guard) (modelRow, bool) {
	inState := r.status == mSending || sending != "" && !m.on(sending) && (r.status.waiting() || r.status == mUnknown)
	if !inState || r.token != token && m.on(own) {
		return r, false
	}
	r.over, r.due = false, false
	return r, true
}

// transient: unsettled −1; tries again: FAILED; else *end*.
func (m model) transient(r modelRow, token uint8, free bool) (modelRow, bool) {
	r, ok := m.settles(r, token, gTransientToken, gTransientSending)
	if !ok {
		return r, false
	}
	usedUp := r.attempts >= r.limit && !free && m.on(gTransientUsedUp)
	if r.unsettled > 0 {
		r.unsettled--
	}
	if free {
		r.attempts--
	}
	if m.on(gEndUnstamped) {
		r.stamped = false
	}
	switch {
	case r.late && m.on(gTransientFlag):
		r.status = mSent
	case !usedUp && (!r.cancel || !m.on(gTransientCancel)):
		r.status = mFailed
	default:
		r = m.end(r)
	}
	return r, true
}

// permanent: unsettled −1; *end*.
func (m model) permanent(r modelRow, token uint8) (modelRow, bool) {
	r, ok := m.settles(r, token, gPermanentToken, gPermanentSending)
	if !ok {
		return r, false
	}
	if r.unsettled > 0 {
		r.unsettled--
	}
	if m.on(gEndUnstamped) {
		r.stamped = false
	}
	if r.late && m.on(gPermanentFlag) {
		r.status = mSent
		return r, true
	}
	return m.end(r), true
}

// ambiguous: hold, used up or cancel requested → UNKNOWN; else FAILED.
func (m model) ambiguous(r modelRow, token uint8) (modelRow, bool) {
	r, ok := m.settles(r, token, gAmbiguousToken, "")
	if !ok {
		return r, false
	}
	if !m.on(gAmbiguousUnsettled) && r.unsettled > 0 {
		r.unsettled--
	}
	switch {
	case r.late && m.on(gAmbiguousFlag):
		r.status = mSent
	case !m.resendable() && m.on(gAmbiguousHold),
		r.attempts >= r.limit && m.on(gAmbiguousUsedUp),
		r.cancel && m.on(gAmbiguousCancel):
		r.status = mUnknown
	default:
		r.status = mFailed
	}
	return r, true
}

// leaseOver: SENDING, lease over, nobody may claim → UNKNOWN (SENT if flagged).
func (m model) leaseOver(r modelRow) (modelRow, bool) {
	if r.status != mSending || !r.over && m.on(gLeaseOverPast) {
		return r, false
	}
	claimable := m.resendable() && m.sendable(r)
	if r.cancel && !m.on(gLeaseOverCancel) {
		// The defect: lease_over and claim disagree about a cancelled row.
		asked := r
		asked.cancel = false
		claimable = m.resendable() && m.sendable(asked)
	}
	if claimable && m.on(gLeaseOverNobody) {
		return r, false
	}
	r.status, r.over = mUnknown, false
	if r.late && m.on(gLeaseOverFlag) {
		r.status = mSent
	}
	return r, true
}

// cancel by an event whose generation is the key's.
func (m model) cancel(r modelRow) (modelRow, bool) {
	if r.status == absent {
		if !m.on(gCancelTombstone) {
			return r, false
		}
		return modelRow{status: mCancelled, limit: m.attempts, cancel: true, old: r.old, sms: r.sms, stopped: r.stopped}, true
	}
	return m.cancelRow(r)
}

func (m model) cancelRow(r modelRow) (modelRow, bool) {
	switch {
	case r.status == mDead, r.status.waiting() && (r.unsettled == 0 || !m.on(gCancelUnsettled)):
		r.status = mCancelled
	case r.status.waiting():
		r.status = mUnknown
	case r.status == mSending && !m.on(gCancelSending),
		r.status == mUnknown && !m.on(gCancelUnknown),
		r.status == mSent && !m.on(gCancelSent):
		r.status, r.over = mCancelled, false
	case (r.status == mSending || r.status == mUnknown) && !r.cancel:
	default:
		return r, false
	}
	r.cancel, r.due = true, false
	return r, true
}

// cancelOld: a cancel whose generation is below the key's.
func (m model) cancelOld(r modelRow) (modelRow, bool) {
	if r.status == absent || m.on(gCancelGeneration) {
		return r, false
	}
	return m.cancelRow(r)
}

// cancelCampaign: a refused claim finds the campaign's flag.
func (m model) cancelCampaign(r modelRow) (modelRow, bool) {
	if !r.stopped || !r.status.waiting() && (r.status != mSending || !r.over || r.cancel) {
		return r, false
	}
	return m.cancelRow(r)
}

// expire: W past expires_at → EXPIRED (UNKNOWN with unsettled > 0).
func (m model) expire(r modelRow) (modelRow, bool) {
	if !r.old || !r.status.waiting() && (m.on(gExpireWaiting) || r.status != mSending) {
		return r, false
	}
	r.status, r.due, r.over = mExpired, false, false
	if r.unsettled > 0 && m.on(gExpireUnsettled) {
		r.status = mUnknown
	}
	return r, true
}

// park: W, a channel without a sender → *end*.
func (m model) park(r modelRow) (modelRow, bool) {
	if !r.status.waiting() {
		return r, false
	}
	r.due, r.stamped = false, false
	return m.end(r), true
}

// replay: DEAD, no cancel request → PENDING.
func (m model) replay(r modelRow, extra uint8) (modelRow, bool) {
	dead := r.status == mDead || r.status.atRest() && !m.on(gReplayDead)
	if !dead || r.cancel && m.on(gReplayCancel) {
		return r, false
	}
	r.status, r.due = mPending, true
	if m.on(gReplayLimit) {
		r.limit = r.attempts + extra
	}
	if !m.on(gReplayToken) {
		r.token = 0
	}
	return r, true
}

// found: UNKNOWN → SENT.
func (m model) found(r modelRow) (modelRow, bool) {
	if r.status != mUnknown {
		return r, false
	}
	r.status = mSent
	return r, true
}

// provenAbsent: UNKNOWN under the proof's token → CANCELLED or PENDING.
func (m model) provenAbsent(r modelRow, token uint8) (modelRow, bool) {
	inState := r.status == mUnknown || r.status != absent && !m.on(gAbsentUnknown)
	if !inState || r.token != token && m.on(gAbsentToken) {
		return r, false
	}
	r.unsettled, r.over = 0, false
	if m.on(gAbsentLimit) {
		r.limit = max(r.limit, r.attempts+1)
	}
	if r.cancel && m.on(gAbsentCancel) {
		r.status = mCancelled
		return r, true
	}
	r.status, r.due = mPending, true
	return r, true
}

// askAgain: UNKNOWN, same-key, no cancel request → PENDING. The age of the key is
// no fact of the model; store_test.go looks at it.
func (m model) askAgain(r modelRow, token uint8) (modelRow, bool) {
	if r.status != mUnknown && m.on(gAskUnknown) || r.status == absent || r.token != token {
		return r, false
	}
	if m.policy != SameKey && m.on(gAskPolicy) || r.cancel && m.on(gAskCancel) || r.sms || r.old || r.stopped {
		return r, false
	}
	if m.on(gAskLimit) {
		r.limit = max(r.limit, r.attempts+1)
	}
	if !m.on(gAskUnsettled) {
		r.unsettled = 0
	}
	r.status, r.due, r.over = mPending, true, false
	return r, true
}

// stampDLQ: the death whose letter was confirmed.
func (m model) stampDLQ(r modelRow, death uint8) (modelRow, bool) {
	if r.status != mDead || r.stamped || r.deaths != death && m.on(gStampVersion) {
		return r, false
	}
	r.stamped = true
	return r, true
}
