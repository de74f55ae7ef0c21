-- Programs that wait for a place: by their force deadline, and by the order of pool/rules/programs/order.py.

-- What a pool holds of a job: its token, when it came, its priority, and the output it expects, false for unknown.
local function opened(ticket)
  local token, queued, prio, expected = string.match(ticket, '^(%x+):(%d+):(%-?%d+):(%d*)$')
  return token, tonumber(queued), tonumber(prio), tonumber(expected) or false
end

-- Sorts as the order does: larger priority, not yielded, what the last finished or the first came, arrival; a member of
-- the order is this and the id. The record keeps this alone: a value above 64 bytes would triple its size.
local function standing_of(p)
  local by = p.mru == 1 and 9999999999999 - (p.finish_ms or 0) or p.queued_ms
  return string.format('%010.0f%d%013.0f%013.0f', 2147483648 - p.prio, p.yielded or 0, by, p.queued_ms)
end

-- What a snapshot shows of it (pool/store/program_waiters.py): with this it reads no record.
local function show_waiting(at, p, ticket)
  redis.call('HSET', at.waiters, p[0].id, string.format('%s:%.0f:%.0f:%.0f:%.0f:%d:%d:%.0f:%.0f:%d:%s', ticket, p.force_ms,
    p.ctx, p.shared or 0, p.prompt or 0, p.was or 0, p.rounds or 0, p.finish_ms or 0, p.activated_ms or 0, p.yielded or 0,
    p.blocks == 1 and p.parent or ''))
end

-- It waits on, for the same job; what another one brought has changed.
local function keep_waiting(at, p)
  redis.call('ZADD', at.waiting, p.force_ms, p[0].id)
  show_waiting(at, p, redis.call('LINDEX', p[0].pool, 0))
end

local function leave_waiting(at, p)
  if not p.standing then return end
  redis.call('ZREM', at.waiting, p[0].id)
  redis.call('ZREM', at.order, p.standing .. p[0].id)
  redis.call('HDEL', at.waiters, p[0].id)
  p.standing, p.queued_ms, p.prio, p.expected, p.force_ms = nil, nil, nil, nil, nil
end

-- It waits with the front of its pool. Its force deadline is set once.
local function wait(at, p, ticket)
  local force_ms = p.force_ms or at.ms + p.patience
  leave_waiting(at, p)
  local _, queued_ms, prio, expected = opened(ticket)
  p.status, p.queued_ms, p.prio, p.expected, p.force_ms = 'reasoning', queued_ms, prio, expected or nil, force_ms
  p.standing = standing_of(p)
  redis.call('ZADD', at.waiting, force_ms, p[0].id)
  redis.call('ZADD', at.order, 0, p.standing .. p[0].id)
  show_waiting(at, p, ticket)
  redis.call('ZREM', at.timers, 'retention:' .. p[0].id)
end

-- A paused Program waits while its pool holds a job; else it is idle, and forgotten in time.
local function settle_paused(at, p)
  local ticket = redis.call('LINDEX', p[0].pool, 0)
  if ticket then return wait(at, p, ticket) end
  leave_waiting(at, p)
  p.status = 'acting'
  redis.call('ZADD', at.timers, at.ms + p.keep, 'retention:' .. p[0].id)
end
