-- unseat: a rank that is away for long leaves the ring, and its keys go once nobody is bound to it by them.
-- KEY members zset
-- ARG rank str
-- ARG gone_after ms since it was last seen
-- INCLUDE clock book
-- FLAGS allow-oom
-- RETURN {"gone"} | {"left", what is still there} | {"live"} | {"early"}
at.rank, at.ms = rank, now_ms()
local seat, seen_ms = redis.call('HGET', at.book, 'incarnation'), redis.call('ZSCORE', members, rank)
if seat and seat ~= '' then return {'live'} end
if seen_ms and at.ms - tonumber(seen_ms) < gone_after then return {'early'} end
if redis.call('ZREM', members, rank) == 1 then redis.call('HINCRBY', at.placement, 'ranks', 1) end
local left = redis.call('ZCARD', at.active) + redis.call('ZCARD', at.waiting) + redis.call('XLEN', at.stream)
if left > 0 then return {'left', left} end
redis.call('DEL', at.book, at.leaving, at.stream, at.requests, at.continuity, at.segments, at.figures)
redis.call('ZREM', at.dirty, rank)
return {'gone'}
