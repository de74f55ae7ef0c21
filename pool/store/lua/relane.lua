-- relane: have a job that waits for its turn wait in another lane, from the place there that its submit time gives it.
-- KEY job hash
-- ARG lane str its place: 0, 1 or 2
-- ARG name str of the lane
-- INCLUDE lanes withdrawing
-- RETURN {"ok"} | {"gone"} | {"program"} its Program decides on its turn | {"not-waiting", state}
local seen = redis.call('HMGET', job, 'state', 'turn', 'program')
if not seen[1] then return {'gone'} end
if seen[3] then return {'program'} end
if not seen[2] or not withdraw_turn(seen[2]) then return {'not-waiting', seen[1]} end
local turn = lane .. string.sub(seen[2], 2)
redis.call('HSET', job, 'lane', name, 'turn', turn)
join(turn)
return {'ok'}
