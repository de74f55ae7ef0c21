-- The operations of a plan.

-- What a book holds of its rank: active Programs and, as pool/rules/programs/capacity.py has them, tokens in use.
local function taken(at, fresh)
  local book = redis.call('HMGET', at.book, 'tokens', 'leaving', 'moved', 'obs_began_ms', 'obs_tokens', 'obs_moved',
    'active')
  local count = tonumber(book[7] or 0)
  local age_ms = book[4] and at.ms - tonumber(book[4])
  if age_ms and age_ms >= 0 and age_ms <= fresh and book[5] and book[5] ~= '' then
    return count, math.max(book[5] + (book[3] or 0) - book[6], 0)
  end
  return count, (book[1] or 0) + (book[2] or 0)
end

-- Why a Program may not become active with the request in front of its pool; nil when it has.
local function admit(at, p, token, why, forced, job, limits)
  if p.state ~= 'paused' or not p.standing then return 'not_waiting' end
  local ticket = redis.call('LINDEX', p[0].pool, 0)
  if not ticket then
    -- Its pool was deleted from outside: it waits for nothing, and what was in there ends by its time limits.
    settle_paused(at, p)
    save(p)
    return 'not_waiting'
  end
  if opened(ticket) ~= token then return 'other_front' end
  local count, used = taken(at, limits.fresh)
  if not forced and count + 1 > limits.most then return 'too_many' end
  local held = redis.call('HGET', at.leaving, p[0].id) or 0
  local needed = math.max(p.ctx - (p.shared or 0), 0) + (p.expected or p.buf) - held
  if limits.capacity > 0 and used + needed > limits.capacity then return 'no_kv' end
  activate(at, p, limits.seat, held)
  redis.call('LPOP', p[0].pool)
  dispatch(at, p, ticket, job)
  event(at, 'admit', p, why)
  -- Behind the front others of the same Program may wait: an active one waits for nothing.
end

local function operate(at, p, kind, detail, job, limits)
  if not p.state then return 'gone' end
  if p.rank ~= at.rank then return 'elsewhere' end
  if kind == 'admit' or kind == 'force' then
    local token, why = string.match(detail, '^(%x+) (.*)$')
    return admit(at, p, token, why, kind == 'force', job, limits)
  end
  if p.state ~= 'active' or is_stale(at, p) then return 'not_active' end
  if kind == 'mark' then
    if p.inflight == 0 then return 'idle' end
    p.mark = 1
    return event(at, 'mark', p, detail)
  end
  if p.inflight > 0 then return 'busy' end
  pause(at, p, detail)
end
